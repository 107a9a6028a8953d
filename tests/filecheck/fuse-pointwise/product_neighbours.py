# RUN: python -m kimigraph.tools.opt %s --passes fuse-pointwise | filecheck --match-full-lines %s
"""A norm before a product of few rows and a gate behind it join it; so do two products of unlike depth and their sum."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (1, 1, 8), (8, 8, 1), "bfloat16"),
    InputSpec("norm", "weight", "norm.weight", (8,), (1,), "bfloat16"),
    InputSpec("gate_up", "weight", "gate_up.weight", (12, 8), (8, 1), "bfloat16"),
    InputSpec("down", "weight", "down.weight", (8, 6), (6, 1), "bfloat16"),
    InputSpec("side", "weight", "side.weight", (8, 8), (8, 1), "bfloat16"),
)
OUTPUTS = ("out",)
CONSTANTS = {}


@torch.no_grad()
def step(x, norm, gate_up, down, side):
    normed = torch.ops.kimigraph.rms_norm.default(x, norm, None, eps=1e-05)
    both = torch.ops.aten.linear.default(normed, gate_up)
    gate = torch.ops.aten.slice.Tensor(both, -1, 0, 6)
    up = torch.ops.aten.slice.Tensor(both, -1, 6, 12)
    silu = torch.ops.aten.silu.default(gate)
    gated = torch.ops.aten.mul.Tensor(silu, up)
    first = torch.ops.aten.linear.default(gated, down)
    second = torch.ops.aten.linear.default(x, side)
    total = torch.ops.aten.add.Tensor(first, second)
    out = torch.ops.aten.add.Tensor(x, total)
    return (out,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, norm, gate_up, down, side):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     pointwise_0 = run_pointwise_0(x, norm, gate_up)  # bfloat16[1, 1, 6]; replaces 6 nodes, normed to gated
# CHECK-NEXT:     pointwise_1 = run_pointwise_1(x, side, pointwise_0, down); del pointwise_0  # bfloat16[1, 1, 8]; replaces 4 nodes, second to out
# CHECK-NEXT:     return (pointwise_1,)
