# RUN: python -m kimigraph.tools.opt %s --passes fuse-pointwise | filecheck --match-full-lines %s
"""The sum reads what the product overwrites through another view: one kernel could read what another step wrote."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (4, 4), (4, 1), "float32"),
    InputSpec("state", "cache", "state", (4, 4), (4, 1), "float32", mutated=True),
)
OUTPUTS = ("out",)
CONSTANTS = {}


@torch.no_grad()
def step(x, state):
    across = torch.ops.aten.t.default(state)
    total = torch.ops.aten.add.Tensor(across, x)
    written = torch.ops.aten.copy_.default(state, total)
    out = torch.ops.aten.linear.default(x, state)
    return (out,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, state):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     across = torch.ops.aten.t.default(state)  # float32[4, 4]
# CHECK-NEXT:     total = torch.ops.aten.add.Tensor(across, x); del across  # float32[4, 4]
# CHECK-NEXT:     torch.ops.aten.copy_.default(state, total); del total  # float32[4, 4]; writes state
# CHECK-NEXT:     out = torch.ops.aten.linear.default(x, state)  # float32[4, 4]
# CHECK-NEXT:     return (out,)
