# RUN: python -m kimigraph.tools.opt %s --passes raise-norms | filecheck --match-full-lines %s
"""In fp32 and without weight; squares may be a product or a power."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (InputSpec("x", "input", "x", (2, 8), (8, 1), "float32"),)
OUTPUTS = ("out", "other")
CONSTANTS = {}


@torch.no_grad()
def step(x):
    square = torch.ops.aten.mul.Tensor(x, x)
    mean = torch.ops.aten.mean.dim(square, [1], True)
    shifted = torch.ops.aten.add.Tensor(mean, 1e-06)
    root = torch.ops.aten.rsqrt.default(shifted)
    out = torch.ops.aten.mul.Tensor(root, x)
    power = torch.ops.aten.pow.Tensor_Scalar(out, 2)
    mean_1 = torch.ops.aten.mean.dim(power, [-1], True)
    shifted_1 = torch.ops.aten.add.Tensor(mean_1, 1e-06)
    root_1 = torch.ops.aten.rsqrt.default(shifted_1)
    other = torch.ops.aten.mul.Tensor(out, root_1)
    return (out, other)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     rms_norm = torch.ops.kimigraph.rms_norm.default(x, None, None, eps=1e-06, rounds_first=False)  # float32[2, 8]; replaces 5 nodes, square to out
# CHECK-NEXT:     rms_norm_1 = torch.ops.kimigraph.rms_norm.default(rms_norm, None, None, eps=1e-06, rounds_first=False)  # float32[2, 8]; replaces 5 nodes, power to other
# CHECK-NEXT:     return (rms_norm, rms_norm_1)
