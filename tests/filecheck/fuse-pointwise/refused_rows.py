# RUN: python -m kimigraph.tools.opt %s --passes fuse-pointwise{lone=false} | filecheck --match-full-lines %s
"""A product of nine rows is a library's; rows that are too long for a program to keep stay apart from theirs."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("many", "input", "many", (9, 2048), (2048, 1), "bfloat16"),
    InputSpec("few", "input", "few", (8, 2048), (2048, 1), "bfloat16"),
    InputSpec("weight", "weight", "weight", (6, 2048), (2048, 1), "bfloat16"),
)
OUTPUTS = ("gated", "product")
CONSTANTS = {}


@torch.no_grad()
def step(many, few, weight):
    wide = torch.ops.aten.linear.default(many, weight)
    gated = torch.ops.aten.silu.default(wide)
    normed = torch.ops.kimigraph.rms_norm.default(few, None, None, eps=1e-05)
    product = torch.ops.aten.linear.default(normed, weight)
    return (gated, product)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(many, few, weight):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     wide = torch.ops.aten.linear.default(many, weight)  # bfloat16[9, 6]
# CHECK-NEXT:     gated = torch.ops.aten.silu.default(wide); del wide  # bfloat16[9, 6]
# CHECK-NEXT:     normed = torch.ops.kimigraph.rms_norm.default(few, None, None, eps=1e-05)  # bfloat16[8, 2048]
# CHECK-NEXT:     product = torch.ops.aten.linear.default(normed, weight); del normed  # bfloat16[8, 6]
# CHECK-NEXT:     return (gated, product)
