# RUN: python -m kimigraph.tools.opt %s --passes fuse-sparse-attention --remarks | filecheck --match-full-lines %s
"""The attention weights are used once more: nothing changes."""

import torch

import kimigraph.ir.operators
from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("q", "input", "q", (2, 2, 1, 6), (12, 6, 6, 1), "float32"),
    InputSpec("latent", "input", "latent", (2, 16, 12), (192, 12, 1), "float32"),
    InputSpec("rope", "input", "rope", (2, 16, 4), (64, 4, 1), "float32"),
    InputSpec("kv_b", "input", "kv_b", (22, 12), (12, 1), "float32"),
    InputSpec("index_q", "input", "index_q", (2, 1, 4, 8), (32, 32, 8, 1), "float32"),
    InputSpec("index_keys", "input", "index_keys", (2, 16, 8), (128, 8, 1), "float32"),
    InputSpec("index_weights", "input", "index_weights", (2, 1, 4), (4, 4, 1), "float32"),
    InputSpec("lengths", "input", "lengths", (2,), (1,), "int32", value_range=(0, 16)),
)
OUTPUTS = ("matmul_3", "amax")
CONSTANTS = {}


@torch.no_grad()
def step(q, latent, rope, kv_b, index_q, index_keys, index_weights, lengths):
    arange = torch.ops.aten.arange.default(16, device=torch.device("cpu"), pin_memory=False)  # int64[16]
    view = torch.ops.aten.view.default(lengths, [2, 1, 1])  # int32[2, 1, 1]
    le = torch.ops.aten.le.Tensor(arange, view)  # bool[2, 1, 16]
    add = torch.ops.aten.add.Tensor(lengths, 1)  # int32[2]
    lightning_indexer = torch.ops.kimigraph.lightning_indexer.default(index_q, index_keys, index_weights, add, None, k=5, scale=1.0, descriptor='')  # int32[2, 1, 5]; selects as topk; replaces 4 nodes, matmul_1 to topk
    clamp_min = torch.ops.aten.clamp_min.default(lightning_indexer, 0)  # int32[2, 1, 5]
    _to_copy = torch.ops.aten._to_copy.default(clamp_min, dtype=torch.int64)  # int64[2, 1, 5]
    zeros = torch.ops.aten.zeros.default([2, 1, 16], dtype=torch.bool, device=torch.device("cpu"), pin_memory=False)  # bool[2, 1, 16]
    scatter = torch.ops.aten.scatter.value(zeros, -1, _to_copy, True)  # bool[2, 1, 16]
    and_1 = torch.ops.aten.__and__.Tensor(scatter, le)  # bool[2, 1, 16]
    linear = torch.ops.aten.linear.default(latent, kv_b)  # float32[2, 16, 22]
    view_1 = torch.ops.aten.view.default(linear, [2, 16, 2, 11])  # float32[2, 16, 2, 11]
    transpose_1 = torch.ops.aten.transpose.int(view_1, 1, 2)  # float32[2, 2, 16, 11]
    split_with_sizes = torch.ops.aten.split_with_sizes.default(transpose_1, [6, 5], -1)  # (float32[2, 2, 16, 6], float32[2, 2, 16, 5])
    getitem_2 = split_with_sizes[0]  # float32[2, 2, 16, 6]
    getitem_3 = split_with_sizes[1]  # float32[2, 2, 16, 5]
    transpose_2 = torch.ops.aten.transpose.int(getitem_2, -1, -2)  # float32[2, 2, 6, 16]
    matmul_2 = torch.ops.aten.matmul.default(q, transpose_2)  # float32[2, 2, 1, 16]
    mul = torch.ops.aten.mul.Tensor(matmul_2, 0.3)  # float32[2, 2, 1, 16]
    unsqueeze_2 = torch.ops.aten.unsqueeze.default(and_1, 1)  # bool[2, 1, 1, 16]
    bitwise_not_1 = torch.ops.aten.bitwise_not.default(unsqueeze_2)  # bool[2, 1, 1, 16]
    masked_fill_1 = torch.ops.aten.masked_fill.Scalar(mul, bitwise_not_1, float("-inf"))  # float32[2, 2, 1, 16]
    softmax = torch.ops.aten.softmax.int(masked_fill_1, -1)  # float32[2, 2, 1, 16]
    matmul_3 = torch.ops.aten.matmul.default(softmax, getitem_3)  # float32[2, 2, 1, 5]
    amax = torch.ops.aten.amax.default(softmax, [-1])  # float32[2, 2, 1]
    return (matmul_3, amax)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(q, latent, rope, kv_b, index_q, index_keys, index_weights, lengths):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     arange = torch.ops.aten.arange.default(16, device=torch.device("cpu"), pin_memory=False)  # int64[16]
# CHECK-NEXT:     view = torch.ops.aten.view.default(lengths, [2, 1, 1])  # int32[2, 1, 1]
# CHECK-NEXT:     le = torch.ops.aten.le.Tensor(arange, view); del arange, view  # bool[2, 1, 16]
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(lengths, 1)  # int32[2]
# CHECK-NEXT:     lightning_indexer = torch.ops.kimigraph.lightning_indexer.default(index_q, index_keys, index_weights, add, None, k=5, scale=1.0, descriptor=''); del add  # int32[2, 1, 5]
# CHECK-NEXT:     clamp_min = torch.ops.aten.clamp_min.default(lightning_indexer, 0); del lightning_indexer  # int32[2, 1, 5]
# CHECK-NEXT:     _to_copy = torch.ops.aten._to_copy.default(clamp_min, dtype=torch.int64); del clamp_min  # int64[2, 1, 5]
# CHECK-NEXT:     zeros = torch.ops.aten.zeros.default([2, 1, 16], dtype=torch.bool, device=torch.device("cpu"), pin_memory=False)  # bool[2, 1, 16]
# CHECK-NEXT:     scatter = torch.ops.aten.scatter.value(zeros, -1, _to_copy, True); del zeros, _to_copy  # bool[2, 1, 16]
# CHECK-NEXT:     and_1 = torch.ops.aten.__and__.Tensor(scatter, le); del scatter, le  # bool[2, 1, 16]
# CHECK-NEXT:     linear = torch.ops.aten.linear.default(latent, kv_b)  # float32[2, 16, 22]
# CHECK-NEXT:     view_1 = torch.ops.aten.view.default(linear, [2, 16, 2, 11]); del linear  # float32[2, 16, 2, 11]
# CHECK-NEXT:     transpose_1 = torch.ops.aten.transpose.int(view_1, 1, 2); del view_1  # float32[2, 2, 16, 11]
# CHECK-NEXT:     split_with_sizes = torch.ops.aten.split_with_sizes.default(transpose_1, [6, 5], -1); del transpose_1  # (float32[2, 2, 16, 6], float32[2, 2, 16, 5])
# CHECK-NEXT:     getitem_2 = split_with_sizes[0]  # float32[2, 2, 16, 6]
# CHECK-NEXT:     getitem_3 = split_with_sizes[1]; del split_with_sizes  # float32[2, 2, 16, 5]
# CHECK-NEXT:     transpose_2 = torch.ops.aten.transpose.int(getitem_2, -1, -2); del getitem_2  # float32[2, 2, 6, 16]
# CHECK-NEXT:     matmul_2 = torch.ops.aten.matmul.default(q, transpose_2); del transpose_2  # float32[2, 2, 1, 16]
# CHECK-NEXT:     mul = torch.ops.aten.mul.Tensor(matmul_2, 0.3); del matmul_2  # float32[2, 2, 1, 16]
# CHECK-NEXT:     unsqueeze_2 = torch.ops.aten.unsqueeze.default(and_1, 1); del and_1  # bool[2, 1, 1, 16]
# CHECK-NEXT:     bitwise_not_1 = torch.ops.aten.bitwise_not.default(unsqueeze_2); del unsqueeze_2  # bool[2, 1, 1, 16]
# CHECK-NEXT:     masked_fill_1 = torch.ops.aten.masked_fill.Scalar(mul, bitwise_not_1, float("-inf")); del mul, bitwise_not_1  # float32[2, 2, 1, 16]
# CHECK-NEXT:     softmax = torch.ops.aten.softmax.int(masked_fill_1, -1); del masked_fill_1  # float32[2, 2, 1, 16]
# CHECK-NEXT:     matmul_3 = torch.ops.aten.matmul.default(softmax, getitem_3); del getitem_3  # float32[2, 2, 1, 5]
# CHECK-NEXT:     amax = torch.ops.aten.amax.default(softmax, [-1]); del softmax  # float32[2, 2, 1]
# CHECK-NEXT:     return (matmul_3, amax)
# CHECK: # missed fuse-sparse-attention at softmax: softmax: the weights are used 2 times
