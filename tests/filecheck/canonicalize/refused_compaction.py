# RUN: python -m kimigraph.tools.opt %s --passes canonicalize --remarks | filecheck --match-full-lines %s
"""Picks of compacted keys are counted, which no rule follows: the compaction stays, and the remark names the count."""

import operator

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("q", "input", "q", (2, 3, 5), (15, 5, 1), "float32"),
    InputSpec("keys", "input", "keys", (2, 8, 5), (40, 5, 1), "float32"),
    InputSpec("valid", "input", "valid", (2, 8), (8, 1), "bool", value_range=(0, 2)),
)
OUTPUTS = ("visible_picks",)
CONSTANTS = {}


@torch.no_grad()
def step(q, keys, valid):
    keep = torch.ops.aten.any.dim(valid, 0)  # bool[8]
    fewer_keys = torch.ops.aten.index.Tensor(keys, [None, keep])  # float32[2, u0, 5]
    count = torch.ops.aten.sym_size.int(fewer_keys, 1)  # u0
    at_most = operator.le(count, 8)  # u0 <= 8
    torch.ops.aten._assert_scalar.default(at_most, "more keys than there are")
    k = torch.sym_min(3, count)  # Min(3, u0)
    fewer_valid = torch.ops.aten.index.Tensor(valid, [None, keep])  # bool[2, u0]
    transpose = torch.ops.aten.transpose.int(fewer_keys, -1, -2)  # float32[2, 5, u0]
    scores = torch.ops.aten.matmul.default(q, transpose)  # float32[2, 3, u0]
    unsqueeze = torch.ops.aten.unsqueeze.default(fewer_valid, 1)  # bool[2, 1, u0]
    visible = torch.ops.aten.expand.default(unsqueeze, [2, 3, -1])  # bool[2, 3, u0]
    hidden = torch.ops.aten.bitwise_not.default(visible)  # bool[2, 3, u0]
    masked = torch.ops.aten.masked_fill.Scalar(scores, hidden, -1e38)  # float32[2, 3, u0]
    topk = torch.ops.aten.topk.default(masked, k)  # (float32[2, 3, Min(3, u0)], int64[2, 3, Min(3, u0)])
    picks = topk[1]  # int64[2, 3, Min(3, u0)]
    picked = torch.ops.aten.gather.default(visible, -1, picks)  # bool[2, 3, Min(3, u0)]
    visible_picks = torch.ops.aten.sum.dim_IntList(picked, [-1])  # int64[2, 3]
    return (visible_picks,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(q, keys, valid):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     keep = torch.ops.aten.any.dim(valid, 0)  # bool[8]
# CHECK-NEXT:     fewer_keys = torch.ops.aten.index.Tensor(keys, [None, keep])  # float32[2, u0, 5]
# CHECK-NEXT:     count = torch.ops.aten.sym_size.int(fewer_keys, 1)  # u0
# CHECK-NEXT:     at_most = operator.le(count, 8)  # u0 <= 8
# CHECK-NEXT:     torch.ops.aten._assert_scalar.default(at_most, 'more keys than there are'); del at_most  # without a value
# CHECK-NEXT:     k = torch.sym_min(3, count); del count  # Min(3, u0)
# CHECK-NEXT:     fewer_valid = torch.ops.aten.index.Tensor(valid, [None, keep]); del keep  # bool[2, u0]
# CHECK-NEXT:     transpose = torch.ops.aten.transpose.int(fewer_keys, -1, -2); del fewer_keys  # float32[2, 5, u0]
# CHECK-NEXT:     scores = torch.ops.aten.matmul.default(q, transpose); del transpose  # float32[2, 3, u0]
# CHECK-NEXT:     unsqueeze = torch.ops.aten.unsqueeze.default(fewer_valid, 1); del fewer_valid  # bool[2, 1, u0]
# CHECK-NEXT:     visible = torch.ops.aten.expand.default(unsqueeze, [2, 3, -1]); del unsqueeze  # bool[2, 3, u0]
# CHECK-NEXT:     hidden = torch.ops.aten.bitwise_not.default(visible)  # bool[2, 3, u0]
# CHECK-NEXT:     masked = torch.ops.aten.masked_fill.Scalar(scores, hidden, -1e+38); del scores, hidden  # float32[2, 3, u0]
# CHECK-NEXT:     topk = torch.ops.aten.topk.default(masked, k); del masked, k  # (float32[2, 3, Min(3, u0)], int64[2, 3, Min(3, u0)])
# CHECK-NEXT:     picks = topk[1]; del topk  # int64[2, 3, Min(3, u0)]
# CHECK-NEXT:     picked = torch.ops.aten.gather.default(visible, -1, picks); del visible, picks  # bool[2, 3, Min(3, u0)]
# CHECK-NEXT:     visible_picks = torch.ops.aten.sum.dim_IntList(picked, [-1]); del picked  # int64[2, 3]
# CHECK-NEXT:     return (visible_picks,)
# CHECK: # missed canonicalize at visible_picks: keep: aten.sum.dim_IntList reads a compacted axis and has no rule here
