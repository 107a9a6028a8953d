# RUN: python -m kimigraph.tools.opt %s --passes fuse-lightning-indexer | filecheck --match-full-lines %s
"""A causal mask over the scores is a number of visible keys a sequence."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("q", "input", "q", (2, 1, 4, 8), (32, 32, 8, 1), "float32"),
    InputSpec("keys", "input", "keys", (2, 16, 8), (128, 8, 1), "float32"),
    InputSpec("weights", "input", "weights", (2, 1, 4), (4, 4, 1), "float32"),
    InputSpec("logits", "input", "logits", (2, 1, 16), (16, 16, 1), "float32"),
    InputSpec("lengths", "input", "lengths", (2,), (1,), "int32", value_range=(0, 16)),
)
OUTPUTS = ("softmax",)
CONSTANTS = {}


@torch.no_grad()
def step(q, keys, weights, logits, lengths):
    arange = torch.ops.aten.arange.default(16, device=torch.device("cpu"), pin_memory=False)  # int64[16]
    view = torch.ops.aten.view.default(lengths, [2, 1, 1])  # int32[2, 1, 1]
    le = torch.ops.aten.le.Tensor(arange, view)  # bool[2, 1, 16]
    transpose = torch.ops.aten.transpose.int(keys, -1, -2)  # float32[2, 8, 16]
    unsqueeze = torch.ops.aten.unsqueeze.default(transpose, 1)  # float32[2, 1, 8, 16]
    matmul = torch.ops.aten.matmul.default(q, unsqueeze)  # float32[2, 1, 4, 16]
    mul = torch.ops.aten.mul.Tensor(matmul, 0.25)  # float32[2, 1, 4, 16]
    relu = torch.ops.aten.relu.default(mul)  # float32[2, 1, 4, 16]
    unsqueeze_1 = torch.ops.aten.unsqueeze.default(weights, -2)  # float32[2, 1, 1, 4]
    matmul_1 = torch.ops.aten.matmul.default(unsqueeze_1, relu)  # float32[2, 1, 1, 16]
    squeeze = torch.ops.aten.squeeze.dim(matmul_1, -2)  # float32[2, 1, 16]
    bitwise_not = torch.ops.aten.bitwise_not.default(le)  # bool[2, 1, 16]
    masked_fill = torch.ops.aten.masked_fill.Scalar(squeeze, bitwise_not, float("-inf"))  # float32[2, 1, 16]
    topk = torch.ops.aten.topk.default(masked_fill, 5)  # (float32[2, 1, 5], int64[2, 1, 5])
    getitem_1 = topk[1]  # int64[2, 1, 5]
    zeros = torch.ops.aten.zeros.default([2, 1, 16], dtype=torch.bool, device=torch.device("cpu"), pin_memory=False)  # bool[2, 1, 16]
    scatter = torch.ops.aten.scatter.value(zeros, -1, getitem_1, True)  # bool[2, 1, 16]
    and_1 = torch.ops.aten.__and__.Tensor(scatter, le)  # bool[2, 1, 16]
    bitwise_not_1 = torch.ops.aten.bitwise_not.default(and_1)  # bool[2, 1, 16]
    masked_fill_1 = torch.ops.aten.masked_fill.Scalar(logits, bitwise_not_1, float("-inf"))  # float32[2, 1, 16]
    softmax = torch.ops.aten.softmax.int(masked_fill_1, -1)  # float32[2, 1, 16]
    return (softmax,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(q, keys, weights, logits, lengths):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     arange = torch.ops.aten.arange.default(16, device=torch.device("cpu"), pin_memory=False)  # int64[16]
# CHECK-NEXT:     view = torch.ops.aten.view.default(lengths, [2, 1, 1])  # int32[2, 1, 1]
# CHECK-NEXT:     le = torch.ops.aten.le.Tensor(arange, view); del arange, view  # bool[2, 1, 16]
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(lengths, 1)  # int32[2]
# CHECK-NEXT:     lightning_indexer = torch.ops.kimigraph.lightning_indexer.default(q, keys, weights, add, None, k=5, scale=0.25, descriptor=''); del add  # int32[2, 1, 5]; selects as topk; replaces 4 nodes, matmul_1 to topk
# CHECK-NEXT:     clamp_min = torch.ops.aten.clamp_min.default(lightning_indexer, 0); del lightning_indexer  # int32[2, 1, 5]
# CHECK-NEXT:     _to_copy = torch.ops.aten._to_copy.default(clamp_min, dtype=torch.int64); del clamp_min  # int64[2, 1, 5]
# CHECK-NEXT:     zeros = torch.ops.aten.zeros.default([2, 1, 16], dtype=torch.bool, device=torch.device("cpu"), pin_memory=False)  # bool[2, 1, 16]
# CHECK-NEXT:     scatter = torch.ops.aten.scatter.value(zeros, -1, _to_copy, True); del zeros, _to_copy  # bool[2, 1, 16]
# CHECK-NEXT:     and_1 = torch.ops.aten.__and__.Tensor(scatter, le); del scatter, le  # bool[2, 1, 16]
# CHECK-NEXT:     bitwise_not_1 = torch.ops.aten.bitwise_not.default(and_1); del and_1  # bool[2, 1, 16]
# CHECK-NEXT:     masked_fill_1 = torch.ops.aten.masked_fill.Scalar(logits, bitwise_not_1, float("-inf")); del bitwise_not_1  # float32[2, 1, 16]
# CHECK-NEXT:     softmax = torch.ops.aten.softmax.int(masked_fill_1, -1); del masked_fill_1  # float32[2, 1, 16]
# CHECK-NEXT:     return (softmax,)
