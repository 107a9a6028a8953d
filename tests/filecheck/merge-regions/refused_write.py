# RUN: python -m kimigraph.tools.opt %s --passes merge-regions | filecheck --match-full-lines %s
"""A write stays between the reads before and after it."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("cache", "cache", "model.cache", (4, 8), (8, 1), "float32", mutated=True),
    InputSpec("x", "input", "model.x", (4, 8), (8, 1), "float32"),
)
OUTPUTS = ("out_0", "out_1")
CONSTANTS = {}


@torch.no_grad()
def step(cache, x):
    sin = torch.ops.aten.sin.default(cache)  # float32[4, 8]
    copy_ = torch.ops.aten.copy_.default(cache, x)  # float32[4, 8]; writes cache
    cos = torch.ops.aten.cos.default(copy_); del copy_  # float32[4, 8]
    return (sin, cos)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(cache, x):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     sin = torch.ops.aten.sin.default(cache)  # float32[4, 8]
# CHECK-NEXT:     copy_ = torch.ops.aten.copy_.default(cache, x)  # float32[4, 8]; writes cache
# CHECK-NEXT:     cos = torch.ops.aten.cos.default(copy_); del copy_  # float32[4, 8]
# CHECK-NEXT:     return (sin, cos)
