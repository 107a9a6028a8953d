# RUN: python -m kimigraph.tools.opt %s --passes merge-horizontal | filecheck --match-full-lines %s
"""Products of the same rows become one; the concatenation of three of them becomes its columns."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "model.x", (2, 1, 16), (16, 16, 1), "float32"),
    InputSpec("q", "weight", "model.q", (8, 16), (16, 1), "float32"),
    InputSpec("k", "weight", "model.k", (8, 16), (16, 1), "float32"),
    InputSpec("v", "weight", "model.v", (8, 16), (16, 1), "float32"),
    InputSpec("gate", "weight", "model.gate", (4, 16), (16, 1), "float32"),
    InputSpec("f", "weight", "model.f", (12, 16), (16, 1), "float32"),
)
OUTPUTS = ("out_0", "out_1", "out_2")
CONSTANTS = {}


@torch.no_grad()
def step(x, q, k, v, gate, f):
    linear = torch.ops.aten.linear.default(x, q)  # float32[2, 1, 8]
    linear_1 = torch.ops.aten.linear.default(x, k)  # float32[2, 1, 8]
    linear_2 = torch.ops.aten.linear.default(x, v)  # float32[2, 1, 8]
    cat = torch.ops.aten.cat.default([linear, linear_1, linear_2], -1); del linear, linear_1, linear_2  # float32[2, 1, 24]
    tanh = torch.ops.aten.tanh.default(cat); del cat  # float32[2, 1, 24]
    linear_3 = torch.ops.aten.linear.default(x, gate)  # float32[2, 1, 4]
    sigmoid = torch.ops.aten.sigmoid.default(linear_3); del linear_3  # float32[2, 1, 4]
    linear_4 = torch.ops.aten.linear.default(x, f)  # float32[2, 1, 12]
    relu = torch.ops.aten.relu.default(linear_4); del linear_4  # float32[2, 1, 12]
    return (tanh, sigmoid, relu)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, q, k, v, gate, f):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     cat_1 = torch.ops.aten.cat.default([q, k, v, gate, f], 0)  # float32[40, 16]
# CHECK-NEXT:     linear_5 = torch.ops.aten.linear.default(x, cat_1); del cat_1  # float32[2, 1, 40]; replaces 5 nodes, linear to linear_4
# CHECK-NEXT:     slice_1 = torch.ops.aten.slice.Tensor(linear_5, -1, 0, 24)  # float32[2, 1, 24]
# CHECK-NEXT:     slice_2 = torch.ops.aten.slice.Tensor(linear_5, -1, 24, 28)  # float32[2, 1, 4]
# CHECK-NEXT:     slice_3 = torch.ops.aten.slice.Tensor(linear_5, -1, 28, 40); del linear_5  # float32[2, 1, 12]
# CHECK-NEXT:     tanh = torch.ops.aten.tanh.default(slice_1); del slice_1  # float32[2, 1, 24]
# CHECK-NEXT:     sigmoid = torch.ops.aten.sigmoid.default(slice_2); del slice_2  # float32[2, 1, 4]
# CHECK-NEXT:     relu = torch.ops.aten.relu.default(slice_3); del slice_3  # float32[2, 1, 12]
# CHECK-NEXT:     return (tanh, sigmoid, relu)
