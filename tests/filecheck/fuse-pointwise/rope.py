# RUN: python -m kimigraph.tools.opt %s --passes fuse-pointwise | filecheck --match-full-lines %s
"""Split, negation and cat of a rotation are arithmetic on addresses of one region."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("q", "input", "q", (2, 16), (16, 1), "float32"),
    InputSpec("cos", "input", "cos", (2, 1, 8), (8, 8, 1), "float32"),
    InputSpec("sin", "input", "sin", (2, 1, 8), (8, 8, 1), "float32"),
)
OUTPUTS = ("out",)
CONSTANTS = {}


@torch.no_grad()
def step(q, cos, sin):
    heads = torch.ops.aten.view.default(q, [2, 2, 8])
    straight = torch.ops.aten.mul.Tensor(heads, cos)
    parts = torch.ops.aten.split.Tensor(heads, 4, -1)
    first = parts[0]
    second = parts[1]
    minus = torch.ops.aten.neg.default(second)
    turned = torch.ops.aten.cat.default([minus, first], -1)
    across = torch.ops.aten.mul.Tensor(turned, sin)
    out = torch.ops.aten.add.Tensor(straight, across)
    return (out,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(q, cos, sin):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     pointwise_0 = run_pointwise_0(q, cos, sin)  # float32[2, 2, 8]; replaces 9 nodes, heads to out
# CHECK-NEXT:     return (pointwise_0,)
