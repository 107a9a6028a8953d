# RUN: python -m kimigraph.tools.opt %s --passes fuse-pointwise | filecheck --match-full-lines %s
"""A write in place is taken along when what reads the old values is; the reader of the new ones follows the region."""

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
    decayed = torch.ops.aten.mul.Tensor(state, 0.5)
    new = torch.ops.aten.add.Tensor(decayed, x)
    written = torch.ops.aten.copy_.default(state, new)
    out = torch.ops.aten.linear.default(x, state)
    return (out,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, state):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     run_pointwise_0(state, x)  # (); writes state; replaces 3 nodes, decayed to written
# CHECK-NEXT:     out = torch.ops.aten.linear.default(x, state)  # float32[2, 2]
# CHECK-NEXT:     return (out,)
