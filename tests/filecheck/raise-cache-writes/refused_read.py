# RUN: python -m kimigraph.tools.opt %s --passes raise-cache-writes --remarks | filecheck --match-full-lines %s
"""The latents are read after their write and before that of the rope part: the two writes cannot become one."""

import torch

import kimigraph.ir.operators
from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

LATENT = "latent{layout=contiguous,dtype=float32,width=6,rope_dim=4,page_size=0,buffers=2}"
INPUTS = (
    InputSpec("latent", "cache", "cache.0.latent", (2, 16, 6), (96, 6, 1), "float32", descriptor=LATENT, mutated=True),
    InputSpec("rope", "cache", "cache.0.rope", (2, 16, 4), (64, 4, 1), "float32", descriptor=LATENT, mutated=True),
    InputSpec("length", "input", "length", (), (), "int64", value_range=(0, 13)),
    InputSpec("new", "input", "new", (2, 3, 6), (18, 6, 1), "float32"),
    InputSpec("turned", "input", "turned", (2, 3, 4), (12, 4, 1), "float32"),
)
OUTPUTS = ("sum_1",)
CONSTANTS = {}


@torch.no_grad()
def step(latent, rope, length, new, turned):
    arange = torch.ops.aten.arange.default(3, device=torch.device("cpu"), pin_memory=False)  # int64[3]
    add = torch.ops.aten.add.Tensor(arange, length)  # int64[3]
    index_copy = torch.ops.aten.index_copy_.default(latent, 1, add, new)  # float32[2, 16, 6]
    sum_1 = torch.ops.aten.sum.default(index_copy)  # float32[]
    index_copy_1 = torch.ops.aten.index_copy_.default(rope, 1, add, turned)  # float32[2, 16, 4]
    return (sum_1,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(latent, rope, length, new, turned):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     arange = torch.ops.aten.arange.default(3, device=torch.device("cpu"), pin_memory=False)  # int64[3]
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(arange, length); del arange  # int64[3]
# CHECK-NEXT:     index_copy = torch.ops.aten.index_copy_.default(latent, 1, add, new)  # float32[2, 16, 6]; writes latent
# CHECK-NEXT:     sum_1 = torch.ops.aten.sum.default(index_copy); del index_copy  # float32[]
# CHECK-NEXT:     torch.ops.aten.index_copy_.default(rope, 1, add, turned); del add  # float32[2, 16, 4]; writes rope
# CHECK-NEXT:     return (sum_1,)
# CHECK: # missed raise-cache-writes at sum_1: index_copy_1: latent is used between the writes of latent and rope part
