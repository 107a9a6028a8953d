# RUN: python -m kimigraph.tools.opt %s --passes fuse-pointwise | filecheck --match-full-lines %s
"""Sums over 4 and over 6 elements are no single loop nest, and a running sum stands before the negation."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (InputSpec("x", "input", "x", (4, 6), (6, 1), "float32"),)
OUTPUTS = ("out", "last")
CONSTANTS = {}


@torch.no_grad()
def step(x):
    along = torch.ops.aten.sum.dim_IntList(x, [0])
    out = torch.ops.aten.sum.dim_IntList(along, [0])
    running = torch.ops.aten.cumsum.default(along, 0)
    last = torch.ops.aten.neg.default(running)
    return (out, last)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     along = torch.ops.aten.sum.dim_IntList(x, [0])  # float32[6]
# CHECK-NEXT:     out = torch.ops.aten.sum.dim_IntList(along, [0])  # float32[]
# CHECK-NEXT:     running = torch.ops.aten.cumsum.default(along, 0); del along  # float32[6]
# CHECK-NEXT:     last = torch.ops.aten.neg.default(running); del running  # float32[6]
# CHECK-NEXT:     return (out, last)
