# RUN: python -m kimigraph.tools.opt %s --passes split-indexer-prolog --remarks | filecheck --match-full-lines %s
"""Branches need streams to run on, and this pipeline assigns none."""

import torch

import kimigraph.ir.operators
from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

KEYS = "index_key{layout=contiguous,dtype=float32,width=32,page_size=0}"
INPUTS = (
    InputSpec("x", "input", "x", (2, 1, 64), (64, 64, 1), "float32"),
    InputSpec("lengths", "input", "lengths", (2,), (1,), "int32", value_range=(0, 31)),
    InputSpec("positions", "input", "positions", (2, 1), (1, 1), "int32", value_range=(0, 31)),
    InputSpec("w_q_a", "weight", "q_a", (48, 64), (64, 1), "float32"),
    InputSpec("w_q_b", "weight", "q_b", (1024, 48), (48, 1), "float32"),
    InputSpec("w_k", "weight", "wk", (32, 64), (64, 1), "float32"),
    InputSpec("w_weights", "weight", "weights_proj", (32, 64), (64, 1), "float32"),
    InputSpec("keys", "cache", "cache.0.index_key", (2, 32, 32), (1024, 32, 1), "float32", True, None, KEYS),
)
OUTPUTS = ("out_0",)
CONSTANTS = {}


@torch.no_grad()
def step(x, lengths, positions, w_q_a, w_q_b, w_k, w_weights, keys):
    rms_norm = torch.ops.kimigraph.rms_norm.default(x, None, None, eps=1e-05, rounds_first=False)
    relu = torch.ops.aten.relu.default(rms_norm)
    linear = torch.ops.aten.linear.default(rms_norm, w_q_a)
    linear_1 = torch.ops.aten.linear.default(linear, w_q_b)
    view = torch.ops.aten.view.default(linear_1, [2, 1, 32, 32])
    linear_2 = torch.ops.aten.linear.default(relu, w_k)
    torch.ops.kimigraph.index_key_write.default(keys, linear_2, positions, descriptor='index_key{layout=contiguous,dtype=float32,width=32,page_size=0}')
    linear_3 = torch.ops.aten.linear.default(relu, w_weights)
    lightning_indexer = torch.ops.kimigraph.lightning_indexer.default(view, keys, linear_3, lengths, None, k=4, scale=1.0, descriptor='index_key{layout=contiguous,dtype=float32,width=32,page_size=0}')
    return (lightning_indexer,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, lengths, positions, w_q_a, w_q_b, w_k, w_weights, keys):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     rms_norm = torch.ops.kimigraph.rms_norm.default(x, None, None, eps=1e-05, rounds_first=False)  # float32[2, 1, 64]
# CHECK-NEXT:     relu = torch.ops.aten.relu.default(rms_norm)  # float32[2, 1, 64]
# CHECK-NEXT:     linear = torch.ops.aten.linear.default(rms_norm, w_q_a); del rms_norm  # float32[2, 1, 48]
# CHECK-NEXT:     linear_1 = torch.ops.aten.linear.default(linear, w_q_b); del linear  # float32[2, 1, 1024]
# CHECK-NEXT:     view = torch.ops.aten.view.default(linear_1, [2, 1, 32, 32]); del linear_1  # float32[2, 1, 32, 32]
# CHECK-NEXT:     linear_2 = torch.ops.aten.linear.default(relu, w_k)  # float32[2, 1, 32]
# CHECK-NEXT:     torch.ops.kimigraph.index_key_write.default(keys, linear_2, positions, descriptor='index_key{layout=contiguous,dtype=float32,width=32,page_size=0}'); del linear_2  # without a value; writes keys
# CHECK-NEXT:     linear_3 = torch.ops.aten.linear.default(relu, w_weights); del relu  # float32[2, 1, 32]
# CHECK-NEXT:     lightning_indexer = torch.ops.kimigraph.lightning_indexer.default(view, keys, linear_3, lengths, None, k=4, scale=1.0, descriptor='index_key{layout=contiguous,dtype=float32,width=32,page_size=0}'); del view, linear_3  # int32[2, 1, 4]
# CHECK-NEXT:     return (lightning_indexer,)
# CHECK: # missed split-indexer-prolog at lightning_indexer: lightning_indexer: no branches, as there is one stream to run on (query: linear, linear_1; index key: linear_2, index_key_write_default; head weights: linear_3): 6.93 us one kernel after another (6 kernels), 6.93 us as three branches on one stream (6 kernels), 6.93 us merged (6 kernels) on NVIDIA H200: branches hide 0.00 us of launches, events paid; merging has 0 kernels fewer, which saves 0.00 us
