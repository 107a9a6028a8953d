# RUN: python -m kimigraph.tools.opt %s --passes fuse-pointwise | filecheck --match-full-lines %s
"""A residual sum and its RMS norm become one region; the view of the norm that a product reads is made outside."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (16, 1, 8), (8, 8, 1), "bfloat16"),
    InputSpec("residual", "input", "residual", (16, 1, 8), (8, 8, 1), "bfloat16"),
    InputSpec("weight", "weight", "norm.weight", (8,), (1,), "bfloat16"),
    InputSpec("up", "weight", "up.weight", (4, 8), (8, 1), "bfloat16"),
)
OUTPUTS = ("out", "total", "half")
CONSTANTS = {}


@torch.no_grad()
def step(x, residual, weight, up):
    total = torch.ops.aten.add.Tensor(x, residual)
    wide = torch.ops.aten._to_copy.default(total, dtype=torch.float32)
    square = torch.ops.aten.square.default(wide)
    mean = torch.ops.aten.mean.dim(square, [-1], True)
    shifted = torch.ops.aten.add.Tensor(mean, 1e-05)
    root = torch.ops.aten.rsqrt.default(shifted)
    normed = torch.ops.aten.mul.Tensor(wide, root)
    wide_weight = torch.ops.aten._to_copy.default(weight, dtype=torch.float32)
    scaled = torch.ops.aten.mul.Tensor(normed, wide_weight)
    norm = torch.ops.aten._to_copy.default(scaled, dtype=torch.bfloat16)
    rows = torch.ops.aten.view.default(norm, [16, 8])
    wide_rows = torch.ops.aten._to_copy.default(rows, dtype=torch.float32)
    half = torch.ops.aten.mul.Tensor(wide_rows, 0.5)
    out = torch.ops.aten.linear.default(rows, up)
    return (out, total, half)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, residual, weight, up):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     pointwise_0 = run_pointwise_0(x, residual, weight)  # (bfloat16[16, 1, 8], bfloat16[16, 1, 8], float32[16, 8]); replaces 13 nodes, total to half
# CHECK-NEXT:     getitem = pointwise_0[0]  # bfloat16[16, 1, 8]
# CHECK-NEXT:     getitem_1 = pointwise_0[1]  # bfloat16[16, 1, 8]
# CHECK-NEXT:     getitem_2 = pointwise_0[2]; del pointwise_0  # float32[16, 8]
# CHECK-NEXT:     rows_1 = torch.ops.aten.view.default(getitem_1, [16, 8]); del getitem_1  # bfloat16[16, 8]
# CHECK-NEXT:     out = torch.ops.aten.linear.default(rows_1, up); del rows_1  # bfloat16[16, 4]
# CHECK-NEXT:     return (out, getitem, getitem_2)
