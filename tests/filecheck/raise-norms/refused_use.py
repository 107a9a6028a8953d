# RUN: python -m kimigraph.tools.opt %s --passes raise-norms | filecheck --match-full-lines %s
"""The root is returned, too: it would have to be computed all the same."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (2, 1, 8), (8, 8, 1), "bfloat16"),
    InputSpec("residual", "input", "residual", (2, 1, 8), (8, 8, 1), "bfloat16"),
    InputSpec("weight", "weight", "norm.weight", (8,), (1,), "bfloat16"),
)
OUTPUTS = ("out", "root")
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
    out = torch.ops.aten._to_copy.default(normed, dtype=torch.bfloat16)
    return (out, root)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, residual, weight):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     total = torch.ops.aten.add.Tensor(x, residual)  # bfloat16[2, 1, 8]
# CHECK-NEXT:     wide = torch.ops.aten._to_copy.default(total, dtype=torch.float32); del total  # float32[2, 1, 8]
# CHECK-NEXT:     square = torch.ops.aten.square.default(wide)  # float32[2, 1, 8]
# CHECK-NEXT:     mean = torch.ops.aten.mean.dim(square, [-1], True); del square  # float32[2, 1, 1]
# CHECK-NEXT:     shifted = torch.ops.aten.add.Tensor(mean, 1e-05); del mean  # float32[2, 1, 1]
# CHECK-NEXT:     root = torch.ops.aten.rsqrt.default(shifted); del shifted  # float32[2, 1, 1]
# CHECK-NEXT:     normed = torch.ops.aten.mul.Tensor(wide, root); del wide  # float32[2, 1, 8]
# CHECK-NEXT:     out = torch.ops.aten._to_copy.default(normed, dtype=torch.bfloat16); del normed  # bfloat16[2, 1, 8]
# CHECK-NEXT:     return (out, root)
