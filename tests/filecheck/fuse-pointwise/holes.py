# RUN: python -m kimigraph.tools.opt %s --passes fuse-pointwise --remarks | filecheck --match-full-lines %s
"""The product that gives a gate's logits and the sum behind experts become operands of the large operators."""

import operator

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("qkv", "input", "qkv", (2, 1, 72), (72, 72, 1), "float32"),
    InputSpec("taps", "weight", "taps", (72, 4), (4, 1), "float32"),
    InputSpec("conv", "cache", "conv", (2, 72, 3), (216, 3, 1), "float32", mutated=True),
    InputSpec("low", "input", "low", (2, 1, 4), (4, 4, 1), "float32"),
    InputSpec("wide", "weight", "wide", (24, 4), (4, 1), "float32"),
    InputSpec("bias", "weight", "bias", (24,), (1,), "float32"),
    InputSpec("rate", "weight", "rate", (3,), (1,), "float32"),
    InputSpec("beta", "input", "beta", (2, 1, 3), (3, 3, 1), "float32"),
    InputSpec("state", "cache", "state", (2, 3, 8, 8), (192, 64, 8, 1), "float32", mutated=True),
    InputSpec("logits", "input", "logits", (2, 4), (4, 1), "float32"),
    InputSpec("gate_up", "weight", "gate_up", (4, 10, 24), (240, 24, 1), "float32"),
    InputSpec("down", "weight", "down", (4, 24, 5), (120, 5, 1), "float32"),
)
OUTPUTS = ("total",)
CONSTANTS = {}


@torch.no_grad()
def step(qkv, taps, conv, low, wide, bias, rate, beta, state, logits, gate_up, down):
    gate = torch.ops.aten.linear.default(low, wide)
    out = torch.ops.kimigraph.kda_decode.default(qkv, taps, conv, gate, bias, rate, beta, state, scale=0.3)
    rows = torch.ops.aten.view.default(out, [2, 24])
    experts = torch.ops.kimigraph.moe_experts.default(rows, logits, None, gate_up, down, picks=2, renormalize=True)
    routed = operator.getitem(experts, 0)
    total = torch.ops.aten.add.Tensor(routed, rows)
    return (total,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(qkv, taps, conv, low, wide, bias, rate, beta, state, logits, gate_up, down):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     out = torch.ops.kimigraph.kda_decode.default(qkv, taps, conv, low, bias, rate, beta, state, None, None, None, wide, scale=0.3)  # float32[2, 1, 3, 8]; writes conv, state; replaces 2 nodes, out to gate
# CHECK-NEXT:     rows = torch.ops.aten.view.default(out, [2, 24]); del out  # float32[2, 24]
# CHECK-NEXT:     experts = torch.ops.kimigraph.moe_experts.default(rows, logits, None, gate_up, down, None, None, None, None, None, rows, picks=2, renormalize=True); del rows  # (float32[2, 24], int32[2, 2]); replaces 2 nodes, experts to total
# CHECK-NEXT:     routed = experts[0]; del experts  # float32[2, 24]
# CHECK-NEXT:     return (routed,)
# CHECK: # passed fuse-pointwise at out: gate became part of out: 2.29 us apart, 1.15 us (0.00918 MB, 4.22e-06 GFLOP, 1 launch) together on NVIDIA H200
# CHECK: # passed fuse-pointwise at experts: total became part of experts: 2.29 us apart, 1.15 us (0.00494 MB, 3.12e-06 GFLOP, 1 launch) together on NVIDIA H200
