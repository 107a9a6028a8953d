# RUN: python -m kimigraph.tools.opt %s --passes assign-streams --remarks | filecheck --match-full-lines %s
"""Each node waits for the one before: by data, or because it writes what that one reads."""

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
# CHECK: # note assign-streams at no node: one stream: the program is a chain, no two nodes of it can run side by side with a gain
