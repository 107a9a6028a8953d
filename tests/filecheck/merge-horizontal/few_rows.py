# RUN: python -m kimigraph.tools.opt %s --passes merge-horizontal | filecheck --match-full-lines %s
"""Products of the same few rows in two types become one region."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "model.x", (2, 1, 16), (16, 16, 1), "bfloat16"),
    InputSpec("a", "weight", "model.a", (8, 16), (16, 1), "bfloat16"),
    InputSpec("b", "weight", "model.b", (16, 16), (16, 1), "bfloat16"),
    InputSpec("router", "weight", "model.router", (4, 16), (16, 1), "float32"),
)
OUTPUTS = ("out_0", "out_1", "out_2")
CONSTANTS = {}


@torch.no_grad()
def step(x, a, b, router):
    linear = torch.ops.aten.linear.default(x, a)  # bfloat16[2, 1, 8]
    relu = torch.ops.aten.relu.default(linear); del linear  # bfloat16[2, 1, 8]
    linear_1 = torch.ops.aten.linear.default(x, b)  # bfloat16[2, 1, 16]
    tanh = torch.ops.aten.tanh.default(linear_1); del linear_1  # bfloat16[2, 1, 16]
    to = torch.ops.aten.to.dtype(x, torch.float32)  # float32[2, 1, 16]
    linear_2 = torch.ops.aten.linear.default(to, router); del to  # float32[2, 1, 4]
    sigmoid = torch.ops.aten.sigmoid.default(linear_2); del linear_2  # float32[2, 1, 4]
    return (relu, tanh, sigmoid)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, a, b, router):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     cat = torch.ops.aten.cat.default([a, b], 0)  # bfloat16[24, 16]
# CHECK-NEXT:     horizontal_0 = run_horizontal_0(x, cat, router); del cat  # (bfloat16[2, 1, 24], float32[2, 1, 4]); replaces 3 nodes, linear_3 to linear_2
# CHECK-NEXT:     getitem = horizontal_0[0]  # bfloat16[2, 1, 24]; replaces 2 nodes, linear to linear_1
# CHECK-NEXT:     getitem_1 = horizontal_0[1]; del horizontal_0  # float32[2, 1, 4]
# CHECK-NEXT:     slice_1 = torch.ops.aten.slice.Tensor(getitem, -1, 0, 8)  # bfloat16[2, 1, 8]
# CHECK-NEXT:     slice_2 = torch.ops.aten.slice.Tensor(getitem, -1, 8, 24); del getitem  # bfloat16[2, 1, 16]
# CHECK-NEXT:     relu = torch.ops.aten.relu.default(slice_1); del slice_1  # bfloat16[2, 1, 8]
# CHECK-NEXT:     tanh = torch.ops.aten.tanh.default(slice_2); del slice_2  # bfloat16[2, 1, 16]
# CHECK-NEXT:     sigmoid = torch.ops.aten.sigmoid.default(getitem_1); del getitem_1  # float32[2, 1, 4]
# CHECK-NEXT:     return (relu, tanh, sigmoid)
