# RUN: python -m kimigraph.tools.opt %s --passes raise-norms | filecheck --match-full-lines %s
"""What is normed is overwritten before the norm is done."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (2, 8), (8, 1), "float32"),
    InputSpec("state", "cache", "state", (2, 8), (8, 1), "float32", mutated=True),
)
OUTPUTS = ("out",)
CONSTANTS = {}


@torch.no_grad()
def step(x, state):
    square = torch.ops.aten.square.default(state)
    mean = torch.ops.aten.mean.dim(square, [-1], True)
    written = torch.ops.aten.copy_.default(state, x)
    shifted = torch.ops.aten.add.Tensor(mean, 1e-06)
    root = torch.ops.aten.rsqrt.default(shifted)
    out = torch.ops.aten.mul.Tensor(state, root)
    return (out,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, state):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     square = torch.ops.aten.square.default(state)  # float32[2, 8]
# CHECK-NEXT:     mean = torch.ops.aten.mean.dim(square, [-1], True); del square  # float32[2, 1]
# CHECK-NEXT:     torch.ops.aten.copy_.default(state, x)  # float32[2, 8]; writes state
# CHECK-NEXT:     shifted = torch.ops.aten.add.Tensor(mean, 1e-06); del mean  # float32[2, 1]
# CHECK-NEXT:     root = torch.ops.aten.rsqrt.default(shifted); del shifted  # float32[2, 1]
# CHECK-NEXT:     out = torch.ops.aten.mul.Tensor(state, root); del root  # float32[2, 8]
# CHECK-NEXT:     return (out,)
