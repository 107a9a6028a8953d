# RUN: python -m kimigraph.tools.opt %s --passes fuse-pointwise | filecheck --match-full-lines %s
"""Sums over 4 and over 6 elements are no single loop nest, and a product stands between sum and cast."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (4, 6), (6, 1), "float32"),
    InputSpec("weight", "weight", "weight", (6, 4), (4, 1), "float32"),
)
OUTPUTS = ("out", "last")
CONSTANTS = {}


@torch.no_grad()
def step(x, weight):
    along = torch.ops.aten.sum.dim_IntList(x, [0])
    out = torch.ops.aten.sum.dim_IntList(along, [0])
    turned = torch.ops.aten.t.default(weight)
    product = torch.ops.aten.linear.default(along, turned)
    last = torch.ops.aten.neg.default(product)
    return (out, last)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, weight):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     along = torch.ops.aten.sum.dim_IntList(x, [0])  # float32[6]
# CHECK-NEXT:     out = torch.ops.aten.sum.dim_IntList(along, [0])  # float32[]
# CHECK-NEXT:     turned = torch.ops.aten.t.default(weight)  # float32[4, 6]
# CHECK-NEXT:     product = torch.ops.aten.linear.default(along, turned); del along, turned  # float32[4]
# CHECK-NEXT:     last = torch.ops.aten.neg.default(product); del product  # float32[4]
# CHECK-NEXT:     return (out, last)
