# RUN: python -m kimigraph.tools.opt %s --passes merge-regions | filecheck --match-full-lines %s
"""Writes into caches of two kinds become one launch."""

import torch

import kimigraph.ir.operators
from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

LATENT = "latent{layout=contiguous,dtype=float32,width=6,rope_dim=4,page_size=0,buffers=2}"
KEYS = "index_key{layout=contiguous,dtype=float32,width=8,page_size=0}"
INPUTS = (
    InputSpec("latent", "cache", "cache.0.latent", (2, 16, 6), (96, 6, 1), "float32", descriptor=LATENT, mutated=True),
    InputSpec("rope", "cache", "cache.0.rope", (2, 16, 4), (64, 4, 1), "float32", descriptor=LATENT, mutated=True),
    InputSpec("keys", "cache", "cache.0.index_key", (2, 16, 8), (128, 8, 1), "float32", descriptor=KEYS, mutated=True),
    InputSpec("lengths", "input", "lengths", (2, 1), (1, 1), "int32", value_range=(0, 15)),
    InputSpec("new", "input", "new", (2, 1, 6), (6, 6, 1), "float32"),
    InputSpec("turned", "input", "turned", (2, 1, 4), (4, 4, 1), "float32"),
    InputSpec("key", "input", "key", (2, 1, 8), (8, 8, 1), "float32"),
    InputSpec("weight", "weight", "weight", (6,), (1,), "float32"),
)
OUTPUTS = ("total",)
CONSTANTS = {}


@torch.no_grad()
def step(latent, rope, keys, lengths, new, turned, key, weight):
    torch.ops.kimigraph.latent_write.default(latent, rope, new, turned, lengths, norm_weight=weight, norm_eps=1e-05, descriptor='latent{layout=contiguous,dtype=float32,width=6,rope_dim=4,page_size=0,buffers=2}')  # without a value; writes latent, rope
    torch.ops.kimigraph.index_key_write.default(keys, key, lengths, descriptor='index_key{layout=contiguous,dtype=float32,width=8,page_size=0}')  # without a value; writes keys
    total = torch.ops.aten.cumsum.default(keys, 1)  # float32[2, 16, 8]
    return (total,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(latent, rope, keys, lengths, new, turned, key, weight):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     run_horizontal_0(latent, rope, new, turned, lengths, weight, keys, key)  # (); writes latent, rope, keys; replaces 2 nodes, latent_write_default to index_key_write_default
# CHECK-NEXT:     total = torch.ops.aten.cumsum.default(keys, 1)  # float32[2, 16, 8]
# CHECK-NEXT:     return (total,)
