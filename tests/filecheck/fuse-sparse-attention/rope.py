# RUN: python -m kimigraph.tools.opt %s --passes fuse-sparse-attention | filecheck --match-full-lines %s
"""A part of the keys is a cache of its own, shared by all heads."""

import torch

import kimigraph.ir.operators
from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("q", "input", "q", (2, 2, 1, 10), (20, 10, 10, 1), "float32"),
    InputSpec("latent", "input", "latent", (2, 16, 12), (192, 12, 1), "float32"),
    InputSpec("rope", "input", "rope", (2, 16, 4), (64, 4, 1), "float32"),
    InputSpec("kv_b", "input", "kv_b", (22, 12), (12, 1), "float32"),
    InputSpec("index_q", "input", "index_q", (2, 1, 4, 8), (32, 32, 8, 1), "float32"),
    InputSpec("index_keys", "input", "index_keys", (2, 16, 8), (128, 8, 1), "float32"),
    InputSpec("index_weights", "input", "index_weights", (2, 1, 4), (4, 4, 1), "float32"),
    InputSpec("lengths", "input", "lengths", (2,), (1,), "int32", value_range=(0, 16)),
)
OUTPUTS = ("matmul_3",)
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
    unsqueeze_2 = torch.ops.aten.unsqueeze.default(rope, 1)  # float32[2, 1, 16, 4]
    expand = torch.ops.aten.expand.default(unsqueeze_2, [-1, 2, -1, -1])  # float32[2, 2, 16, 4]
    cat = torch.ops.aten.cat.default([getitem_2, expand], -1)  # float32[2, 2, 16, 10]
    transpose_2 = torch.ops.aten.transpose.int(cat, -1, -2)  # float32[2, 2, 10, 16]
    matmul_2 = torch.ops.aten.matmul.default(q, transpose_2)  # float32[2, 2, 1, 16]
    mul = torch.ops.aten.mul.Tensor(matmul_2, 0.3)  # float32[2, 2, 1, 16]
    unsqueeze_3 = torch.ops.aten.unsqueeze.default(and_1, 1)  # bool[2, 1, 1, 16]
    bitwise_not_1 = torch.ops.aten.bitwise_not.default(unsqueeze_3)  # bool[2, 1, 1, 16]
    masked_fill_1 = torch.ops.aten.masked_fill.Scalar(mul, bitwise_not_1, float("-inf"))  # float32[2, 2, 1, 16]
    softmax = torch.ops.aten.softmax.int(masked_fill_1, -1)  # float32[2, 2, 1, 16]
    matmul_3 = torch.ops.aten.matmul.default(softmax, getitem_3)  # float32[2, 2, 1, 5]
    return (matmul_3,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(q, latent, rope, kv_b, index_q, index_keys, index_weights, lengths):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(lengths, 1)  # int32[2]
# CHECK-NEXT:     lightning_indexer = torch.ops.kimigraph.lightning_indexer.default(index_q, index_keys, index_weights, add, None, k=5, scale=1.0, descriptor=''); del add  # int32[2, 1, 5]
# CHECK-NEXT:     view_2 = torch.ops.aten.view.default(kv_b, [2, 11, 12])  # float32[2, 11, 12]
# CHECK-NEXT:     slice_1 = torch.ops.aten.slice.Tensor(view_2, 1, 0, 6)  # float32[2, 6, 12]
# CHECK-NEXT:     slice_2 = torch.ops.aten.slice.Tensor(view_2, 1, 6, 11); del view_2  # float32[2, 5, 12]
# CHECK-NEXT:     slice_3 = torch.ops.aten.slice.Tensor(q, 3, 0, 6)  # float32[2, 2, 1, 6]
# CHECK-NEXT:     permute = torch.ops.aten.permute.default(slice_3, [1, 0, 2, 3]); del slice_3  # float32[2, 2, 1, 6]
# CHECK-NEXT:     reshape = torch.ops.aten.reshape.default(permute, [2, 2, 6]); del permute  # float32[2, 2, 6]
# CHECK-NEXT:     bmm = torch.ops.aten.bmm.default(reshape, slice_1); del reshape, slice_1  # float32[2, 2, 12]
# CHECK-NEXT:     transpose = torch.ops.aten.transpose.int(bmm, 0, 1); del bmm  # float32[2, 2, 12]
# CHECK-NEXT:     view_3 = torch.ops.aten.view.default(transpose, [2, 1, 2, 12]); del transpose  # float32[2, 1, 2, 12]
# CHECK-NEXT:     slice_4 = torch.ops.aten.slice.Tensor(q, 3, 6, 10)  # float32[2, 2, 1, 4]
# CHECK-NEXT:     transpose_3 = torch.ops.aten.transpose.int(slice_4, 1, 2); del slice_4  # float32[2, 1, 2, 4]
# CHECK-NEXT:     sparse_attention = torch.ops.kimigraph.sparse_attention.default(view_3, transpose_3, latent, rope, lightning_indexer, scale=0.3, descriptor=''); del view_3, transpose_3, lightning_indexer  # (float32[2, 1, 2, 12], float32[2, 1, 2]); replaces 3 nodes, matmul_2 to matmul_3
# CHECK-NEXT:     getitem = sparse_attention[0]; del sparse_attention  # float32[2, 1, 2, 12]
# CHECK-NEXT:     view_4 = torch.ops.aten.view.default(getitem, [2, 2, 12]); del getitem  # float32[2, 2, 12]
# CHECK-NEXT:     transpose_4 = torch.ops.aten.transpose.int(view_4, 0, 1); del view_4  # float32[2, 2, 12]
# CHECK-NEXT:     transpose_5 = torch.ops.aten.transpose.int(slice_2, 1, 2); del slice_2  # float32[2, 12, 5]
# CHECK-NEXT:     bmm_1 = torch.ops.aten.bmm.default(transpose_4, transpose_5); del transpose_4, transpose_5  # float32[2, 2, 5]
# CHECK-NEXT:     view_5 = torch.ops.aten.view.default(bmm_1, [2, 2, 1, 5]); del bmm_1  # float32[2, 2, 1, 5]
# CHECK-NEXT:     permute_1 = torch.ops.aten.permute.default(view_5, [1, 0, 2, 3]); del view_5  # float32[2, 2, 1, 5]
# CHECK-NEXT:     return (permute_1,)
