# RUN: python -m kimigraph.tools.opt %s --passes raise-moe | filecheck --match-full-lines %s
"""Nothing follows the weighted sum but another use of it."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (2, 8), (8, 1), "float32"),
    InputSpec("logits", "input", "logits", (2, 6), (6, 1), "float32"),
    InputSpec("bias", "weight", "bias", (6,), (1,), "float32"),
    InputSpec("gate_up", "weight", "gate_up", (6, 10, 8), (80, 8, 1), "float32"),
    InputSpec("down", "weight", "down", (6, 8, 5), (40, 5, 1), "float32"),
)
OUTPUTS = ("out", "other")
CONSTANTS = {}


@torch.no_grad()
def step(x, logits, bias, gate_up, down):
    score = torch.ops.aten.sigmoid.default(logits)
    choice = torch.ops.aten.add.Tensor(score, bias)
    top = torch.ops.aten.topk.default(choice, 2, -1, True, False)
    picks = top[1]
    chosen = torch.ops.aten.gather.default(score, -1, picks)
    total = torch.ops.aten.sum.dim_IntList(chosen, [-1], True)
    guarded = torch.ops.aten.add.Tensor(total, 1e-20)
    ratio = torch.ops.aten.div.Tensor(chosen, guarded)
    weight = torch.ops.aten.mul.Tensor(ratio, 2.5)
    flat = torch.ops.aten.view.default(picks, [-1])
    rows = torch.ops.aten.repeat_interleave.self_int(x, 2, 0)
    column = torch.ops.aten.unsqueeze.default(rows, -1)
    first = torch.ops.aten.index.Tensor(gate_up, [flat])
    opened = torch.ops.aten.bmm.default(first, column)
    squeezed = torch.ops.aten.squeeze.dim(opened, -1)
    halves = torch.ops.aten.split.Tensor(squeezed, 5, -1)
    gate = halves[0]
    linear = halves[1]
    active = torch.ops.aten.silu.default(gate)
    hidden = torch.ops.aten.mul.Tensor(active, linear)
    inner = torch.ops.aten.unsqueeze.default(hidden, -1)
    second = torch.ops.aten.index.Tensor(down, [flat])
    closed = torch.ops.aten.bmm.default(second, inner)
    outputs = torch.ops.aten.view.default(closed, [2, 2, 8])
    factor = torch.ops.aten.unsqueeze.default(weight, -1)
    weighted = torch.ops.aten.mul.Tensor(outputs, factor)
    routed = torch.ops.aten.sum.dim_IntList(weighted, [1])
    out = torch.ops.aten.mul.Tensor(routed, 2.0)
    other = torch.ops.aten.add.Tensor(routed, 1.0)
    return (out, other)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, logits, bias, gate_up, down):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     moe_experts = torch.ops.kimigraph.moe_experts.default(x, logits, bias, gate_up, down, None, None, None, None, None, picks=2, renormalize=True, scale=2.5, groups=1, group_picks=1, activation='swiglu', beta=1.0, linear_beta=None, limit=None, eps=1e-05)  # (float32[2, 8], int32[2, 2]); selects as top; replaces 5 nodes, top to routed
# CHECK-NEXT:     getitem = moe_experts[0]; del moe_experts  # float32[2, 8]
# CHECK-NEXT:     out = torch.ops.aten.mul.Tensor(getitem, 2.0)  # float32[2, 8]
# CHECK-NEXT:     other = torch.ops.aten.add.Tensor(getitem, 1.0); del getitem  # float32[2, 8]
# CHECK-NEXT:     return (out, other)
