# RUN: python -m kimigraph.tools.opt %s --passes canonicalize | filecheck --match-full-lines %s
"""Views, casts and copies that hand on what they get go; a copy stays where what it copies is written behind it."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (2, 4), (4, 1), "float32"),
    InputSpec("state", "cache", "state", (2, 4), (4, 1), "float32", mutated=True),
)
OUTPUTS = ("out", "before")
CONSTANTS = {}


@torch.no_grad()
def step(x, state):
    same_shape = torch.ops.aten.view.default(x, [2, 4])
    same_type = torch.ops.aten._to_copy.default(same_shape, dtype=torch.float32)
    no_padding = torch.ops.aten.constant_pad_nd.default(same_type, [0, 0])
    other_shape = torch.ops.aten.view.default(no_padding, [4, 2])
    needless = torch.ops.aten.clone.default(other_shape)
    out = torch.ops.aten.sin.default(needless)
    kept = torch.ops.aten.clone.default(state)
    write = torch.ops.aten.copy_.default(state, x)
    before = torch.ops.aten.cos.default(kept)
    return (out, before)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, state):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     other_shape = torch.ops.aten.view.default(x, [4, 2])  # float32[4, 2]
# CHECK-NEXT:     out = torch.ops.aten.sin.default(other_shape); del other_shape  # float32[4, 2]
# CHECK-NEXT:     kept = torch.ops.aten.clone.default(state)  # float32[2, 4]
# CHECK-NEXT:     torch.ops.aten.copy_.default(state, x)  # float32[2, 4]; writes state
# CHECK-NEXT:     before = torch.ops.aten.cos.default(kept); del kept  # float32[2, 4]
# CHECK-NEXT:     return (out, before)
