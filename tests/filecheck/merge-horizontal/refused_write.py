# RUN: python -m kimigraph.tools.opt %s --passes merge-horizontal --remarks | filecheck --match-full-lines %s
"""The rows are written between two products of them, so these stay apart."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "cache", "model.x", (16, 16), (16, 1), "float32", mutated=True),
    InputSpec("a", "weight", "model.a", (8, 16), (16, 1), "float32"),
    InputSpec("b", "weight", "model.b", (8, 16), (16, 1), "float32"),
)
OUTPUTS = ("out_0", "out_1")
CONSTANTS = {}


@torch.no_grad()
def step(x, a, b):
    linear = torch.ops.aten.linear.default(x, a)  # float32[16, 8]
    relu = torch.ops.aten.relu.default(linear); del linear  # float32[16, 8]
    torch.ops.aten.mul_.Tensor(x, 2)  # float32[16, 16]; writes x
    linear_1 = torch.ops.aten.linear.default(x, b)  # float32[16, 8]
    relu_1 = torch.ops.aten.relu.default(linear_1); del linear_1  # float32[16, 8]
    return (relu, relu_1)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, a, b):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     linear = torch.ops.aten.linear.default(x, a)  # float32[16, 8]
# CHECK-NEXT:     relu = torch.ops.aten.relu.default(linear); del linear  # float32[16, 8]
# CHECK-NEXT:     torch.ops.aten.mul_.Tensor(x, 2)  # float32[16, 16]; writes x
# CHECK-NEXT:     linear_1 = torch.ops.aten.linear.default(x, b)  # float32[16, 8]
# CHECK-NEXT:     relu_1 = torch.ops.aten.relu.default(linear_1); del linear_1  # float32[16, 8]
# CHECK-NEXT:     return (relu, relu_1)
# CHECK: # missed merge-horizontal at linear_1: linear: linear_1 waits for linear
