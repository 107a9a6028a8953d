# RUN: python -m kimigraph.tools.opt %s --passes verify-schedule --remarks | filecheck --match-full-lines %s
"""A program on one stream, without an arena: its own order keeps all dependences."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "model.x", (4, 8), (8, 1), "float32"),
    InputSpec("cache", "cache", "model.cache", (4, 8), (8, 1), "float32", mutated=True),
)
OUTPUTS = ("out_0",)
CONSTANTS = {}


@torch.no_grad()
def step(x, cache):
    sin = torch.ops.aten.sin.default(cache)  # float32[4, 8]
    copy_ = torch.ops.aten.copy_.default(cache, x); del copy_  # float32[4, 8]; writes cache
    add = torch.ops.aten.add.Tensor(sin, cache); del sin  # float32[4, 8]
    return (add,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, cache):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     sin = torch.ops.aten.sin.default(cache)  # float32[4, 8]
# CHECK-NEXT:     torch.ops.aten.copy_.default(cache, x)  # float32[4, 8]; writes cache
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(sin, cache); del sin  # float32[4, 8]
# CHECK-NEXT:     return (add,)
# CHECK: # note verify-schedule at no node: no race, every stream joined: 3 nodes, 3 dependences, 1 streams, 0 events, 0 buffers
