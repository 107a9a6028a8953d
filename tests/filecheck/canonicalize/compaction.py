# RUN: python -m kimigraph.tools.opt %s --passes canonicalize | filecheck --match-full-lines %s
"""Keys are compacted before a top-k whose mask refuses what was dropped: the compaction goes, all sizes are static."""

import operator

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("q", "input", "q", (2, 3, 5), (15, 5, 1), "float32"),
    InputSpec("keys", "input", "keys", (2, 8, 5), (40, 5, 1), "float32"),
    InputSpec("valid", "input", "valid", (2, 8), (8, 1), "bool", value_range=(0, 2)),
    InputSpec("slots", "input", "slots", (2, 8), (8, 1), "int64", value_range=(0, 8)),
)
OUTPUTS = ("marked",)
CONSTANTS = {}


@torch.no_grad()
def step(q, keys, valid, slots):
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
    invalid = torch.ops.aten.bitwise_not.default(valid)  # bool[2, 8]
    valid_slots = torch.ops.aten.masked_fill.Scalar(slots, invalid, -1)  # int64[2, 8]
    fewer_slots = torch.ops.aten.index.Tensor(valid_slots, [None, keep])  # int64[2, u0]
    rows = torch.ops.aten.arange.default(2)  # int64[2]
    column = torch.ops.aten.view.default(rows, [2, 1, 1])  # int64[2, 1, 1]
    chosen = torch.ops.aten.index.Tensor(fewer_slots, [column, picks])  # int64[2, 3, Min(3, u0)]
    unpicked = torch.ops.aten.bitwise_not.default(picked)  # bool[2, 3, Min(3, u0)]
    sure = torch.ops.aten.masked_fill.Scalar(chosen, unpicked, -1)  # int64[2, 3, Min(3, u0)]
    missing = operator.sub(4, k)  # 4 - Min(3, u0)
    padded = torch.ops.aten.pad.default(sure, [0, missing], "constant", -1.0)  # int64[2, 3, 4]
    inside = torch.ops.aten.ge.Scalar(padded, 0)  # bool[2, 3, 4]
    ones = torch.ops.aten._to_copy.default(inside, dtype=torch.int32)  # int32[2, 3, 4]
    zeros = torch.ops.aten.zeros.default([2, 3, 8], dtype=torch.int32)  # int32[2, 3, 8]
    index = torch.ops.aten.clamp.default(padded, 0)  # int64[2, 3, 4]
    counts = torch.ops.aten.scatter_add.default(zeros, -1, index, ones)  # int32[2, 3, 8]
    marked = torch.ops.aten.ne.Scalar(counts, 0)  # bool[2, 3, 8]
    return (marked,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(q, keys, valid, slots):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     transpose = torch.ops.aten.transpose.int(keys, -1, -2)  # float32[2, 5, 8]
# CHECK-NEXT:     scores = torch.ops.aten.matmul.default(q, transpose); del transpose  # float32[2, 3, 8]
# CHECK-NEXT:     unsqueeze = torch.ops.aten.unsqueeze.default(valid, 1)  # bool[2, 1, 8]
# CHECK-NEXT:     visible = torch.ops.aten.expand.default(unsqueeze, [2, 3, -1]); del unsqueeze  # bool[2, 3, 8]
# CHECK-NEXT:     hidden = torch.ops.aten.bitwise_not.default(visible)  # bool[2, 3, 8]
# CHECK-NEXT:     masked = torch.ops.aten.masked_fill.Scalar(scores, hidden, -1e+38); del scores, hidden  # float32[2, 3, 8]
# CHECK-NEXT:     topk = torch.ops.aten.topk.default(masked, 3); del masked  # (float32[2, 3, 3], int64[2, 3, 3])
# CHECK-NEXT:     picks = topk[1]; del topk  # int64[2, 3, 3]
# CHECK-NEXT:     picked = torch.ops.aten.gather.default(visible, -1, picks); del visible  # bool[2, 3, 3]
# CHECK-NEXT:     invalid = torch.ops.aten.bitwise_not.default(valid)  # bool[2, 8]
# CHECK-NEXT:     valid_slots = torch.ops.aten.masked_fill.Scalar(slots, invalid, -1); del invalid  # int64[2, 8]
# CHECK-NEXT:     rows = torch.ops.aten.arange.default(2)  # int64[2]
# CHECK-NEXT:     column = torch.ops.aten.view.default(rows, [2, 1, 1]); del rows  # int64[2, 1, 1]
# CHECK-NEXT:     chosen = torch.ops.aten.index.Tensor(valid_slots, [column, picks]); del picks, valid_slots, column  # int64[2, 3, 3]
# CHECK-NEXT:     unpicked = torch.ops.aten.bitwise_not.default(picked); del picked  # bool[2, 3, 3]
# CHECK-NEXT:     sure = torch.ops.aten.masked_fill.Scalar(chosen, unpicked, -1); del chosen, unpicked  # int64[2, 3, 3]
# CHECK-NEXT:     padded = torch.ops.aten.pad.default(sure, [0, 1], 'constant', -1.0); del sure  # int64[2, 3, 4]
# CHECK-NEXT:     inside = torch.ops.aten.ge.Scalar(padded, 0)  # bool[2, 3, 4]
# CHECK-NEXT:     ones = torch.ops.aten._to_copy.default(inside, dtype=torch.int32); del inside  # int32[2, 3, 4]
# CHECK-NEXT:     zeros = torch.ops.aten.zeros.default([2, 3, 8], dtype=torch.int32)  # int32[2, 3, 8]
# CHECK-NEXT:     index = torch.ops.aten.clamp.default(padded, 0); del padded  # int64[2, 3, 4]
# CHECK-NEXT:     counts = torch.ops.aten.scatter_add.default(zeros, -1, index, ones); del zeros, index, ones  # int32[2, 3, 8]
# CHECK-NEXT:     marked = torch.ops.aten.ne.Scalar(counts, 0); del counts  # bool[2, 3, 8]
# CHECK-NEXT:     return (marked,)
