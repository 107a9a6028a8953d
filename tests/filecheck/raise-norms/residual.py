# RUN: python -m kimigraph.tools.opt %s --passes raise-norms | filecheck --match-full-lines %s
"""A norm with one rounding at the end takes along the sum that nothing else reads."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (2, 1, 8), (8, 8, 1), "bfloat16"),
    InputSpec("residual", "input", "residual", (2, 1, 8), (8, 8, 1), "bfloat16"),
    InputSpec("weight", "weight", "norm.weight", (8,), (1,), "bfloat16"),
)
OUTPUTS = ("out",)
CONSTANTS = {}


@torch.no_grad()
def step(x, residual, weight):
    total = torch.ops.aten.add.Tensor(x, residual)
    wide = torch.ops.aten._to_copy.default(total, dtype=torch.float32)
    square = torch.ops.aten.square.default(wide)
    mean = torch.ops.aten.mean.dim(square, [-1], True)
    shifted = torch.ops.aten.add.Tensor(mean, 1e-05)
    root = torch.ops.aten.rsqrt.default(shifted)
    normed = torch.ops.aten.mul.Tensor(wide, root)
    wide_weight = torch.ops.aten._to_copy.default(weight, dtype=torch.float32)
    scaled = torch.ops.aten.mul.Tensor(wide_weight, normed)
    out = torch.ops.aten._to_copy.default(scaled, dtype=torch.bfloat16)
    return (out,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, residual, weight):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     rms_norm = torch.ops.kimigraph.rms_norm.default(x, weight, residual, eps=1e-05, rounds_first=False)  # bfloat16[2, 1, 8]; replaces 9 nodes, wide to out
# CHECK-NEXT:     return (rms_norm,)
