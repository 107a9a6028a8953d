# RUN: python -m kimigraph.tools.opt %s --passes raise-moe | filecheck --match-full-lines %s
"""The picks are returned: they would have to be computed all the same."""

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
OUTPUTS = ("routed", "picks")
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
    return (routed, picks)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, logits, bias, gate_up, down):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     score = torch.ops.aten.sigmoid.default(logits)  # float32[2, 6]
# CHECK-NEXT:     choice = torch.ops.aten.add.Tensor(score, bias)  # float32[2, 6]
# CHECK-NEXT:     top = torch.ops.aten.topk.default(choice, 2, -1, True, False); del choice  # (float32[2, 2], int64[2, 2])
# CHECK-NEXT:     picks = top[1]; del top  # int64[2, 2]
# CHECK-NEXT:     chosen = torch.ops.aten.gather.default(score, -1, picks); del score  # float32[2, 2]
# CHECK-NEXT:     total = torch.ops.aten.sum.dim_IntList(chosen, [-1], True)  # float32[2, 1]
# CHECK-NEXT:     guarded = torch.ops.aten.add.Tensor(total, 1e-20); del total  # float32[2, 1]
# CHECK-NEXT:     ratio = torch.ops.aten.div.Tensor(chosen, guarded); del chosen, guarded  # float32[2, 2]
# CHECK-NEXT:     weight = torch.ops.aten.mul.Tensor(ratio, 2.5); del ratio  # float32[2, 2]
# CHECK-NEXT:     flat = torch.ops.aten.view.default(picks, [-1])  # int64[4]
# CHECK-NEXT:     rows = torch.ops.aten.repeat_interleave.self_int(x, 2, 0)  # float32[4, 8]
# CHECK-NEXT:     column = torch.ops.aten.unsqueeze.default(rows, -1); del rows  # float32[4, 8, 1]
# CHECK-NEXT:     first = torch.ops.aten.index.Tensor(gate_up, [flat])  # float32[4, 10, 8]
# CHECK-NEXT:     opened = torch.ops.aten.bmm.default(first, column); del first, column  # float32[4, 10, 1]
# CHECK-NEXT:     squeezed = torch.ops.aten.squeeze.dim(opened, -1); del opened  # float32[4, 10]
# CHECK-NEXT:     halves = torch.ops.aten.split.Tensor(squeezed, 5, -1); del squeezed  # (float32[4, 5], float32[4, 5])
# CHECK-NEXT:     gate = halves[0]  # float32[4, 5]
# CHECK-NEXT:     linear = halves[1]; del halves  # float32[4, 5]
# CHECK-NEXT:     active = torch.ops.aten.silu.default(gate); del gate  # float32[4, 5]
# CHECK-NEXT:     hidden = torch.ops.aten.mul.Tensor(active, linear); del active, linear  # float32[4, 5]
# CHECK-NEXT:     inner = torch.ops.aten.unsqueeze.default(hidden, -1); del hidden  # float32[4, 5, 1]
# CHECK-NEXT:     second = torch.ops.aten.index.Tensor(down, [flat]); del flat  # float32[4, 8, 5]
# CHECK-NEXT:     closed = torch.ops.aten.bmm.default(second, inner); del second, inner  # float32[4, 8, 1]
# CHECK-NEXT:     outputs = torch.ops.aten.view.default(closed, [2, 2, 8]); del closed  # float32[2, 2, 8]
# CHECK-NEXT:     factor = torch.ops.aten.unsqueeze.default(weight, -1); del weight  # float32[2, 2, 1]
# CHECK-NEXT:     weighted = torch.ops.aten.mul.Tensor(outputs, factor); del outputs, factor  # float32[2, 2, 8]
# CHECK-NEXT:     routed = torch.ops.aten.sum.dim_IntList(weighted, [1]); del weighted  # float32[2, 8]
# CHECK-NEXT:     return (routed, picks)
