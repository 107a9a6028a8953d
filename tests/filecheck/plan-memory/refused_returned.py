# RUN: python -m kimigraph.tools.opt %s --passes plan-memory --remarks | filecheck --match-full-lines %s
"""What the step returns lies outside, and nothing else is made."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (InputSpec("x", "input", "model.x", (4, 8), (8, 1), "float32"),)
OUTPUTS = ("out_0",)
CONSTANTS = {}


@torch.no_grad()
def step(x):
    sin = torch.ops.aten.sin.default(x)  # float32[4, 8]
    return (sin,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     sin = torch.ops.aten.sin.default(x)  # float32[4, 8]
# CHECK-NEXT:     return (sin,)
# CHECK: # note plan-memory at sin: sin lies outside the arena: the step returns it
