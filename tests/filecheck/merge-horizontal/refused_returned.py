# RUN: python -m kimigraph.tools.opt %s --passes merge-horizontal --remarks | filecheck --match-full-lines %s
"""A result that the step returns has memory of its own, so it is no column of another."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "model.x", (16, 16), (16, 1), "float32"),
    InputSpec("a", "weight", "model.a", (8, 16), (16, 1), "float32"),
    InputSpec("b", "weight", "model.b", (8, 16), (16, 1), "float32"),
)
OUTPUTS = ("out_0", "out_1")
CONSTANTS = {}


@torch.no_grad()
def step(x, a, b):
    linear = torch.ops.aten.linear.default(x, a)  # float32[16, 8]
    linear_1 = torch.ops.aten.linear.default(x, b)  # float32[16, 8]
    relu = torch.ops.aten.relu.default(linear_1); del linear_1  # float32[16, 8]
    return (linear, relu)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, a, b):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     linear = torch.ops.aten.linear.default(x, a)  # float32[16, 8]
# CHECK-NEXT:     linear_1 = torch.ops.aten.linear.default(x, b)  # float32[16, 8]
# CHECK-NEXT:     relu = torch.ops.aten.relu.default(linear_1); del linear_1  # float32[16, 8]
# CHECK-NEXT:     return (linear, relu)
# CHECK: # missed merge-horizontal at linear: linear: its result is returned or written, so it needs memory of its own
