# RUN: python -m kimigraph.tools.opt %s --passes fuse-sparse-attention | filecheck --match-full-lines %s
"""No picks: a causal length over all keys becomes latent_attention."""

import torch

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
OUTPUTS = ("matmul_1",)
CONSTANTS = {}


@torch.no_grad()
def step(q, latent, rope, kv_b, index_q, index_keys, index_weights, lengths):
    arange = torch.ops.aten.arange.default(16, device=torch.device("cpu"), pin_memory=False)  # int64[16]
    view = torch.ops.aten.view.default(lengths, [2, 1, 1])  # int32[2, 1, 1]
    le = torch.ops.aten.le.Tensor(arange, view)  # bool[2, 1, 16]
    linear = torch.ops.aten.linear.default(latent, kv_b)  # float32[2, 16, 22]
    view_1 = torch.ops.aten.view.default(linear, [2, 16, 2, 11])  # float32[2, 16, 2, 11]
    transpose = torch.ops.aten.transpose.int(view_1, 1, 2)  # float32[2, 2, 16, 11]
    split_with_sizes = torch.ops.aten.split_with_sizes.default(
        transpose, [6, 5], -1
    )  # (float32[2, 2, 16, 6], float32[2, 2, 16, 5])
    getitem = split_with_sizes[0]  # float32[2, 2, 16, 6]
    getitem_1 = split_with_sizes[1]  # float32[2, 2, 16, 5]
    transpose_1 = torch.ops.aten.transpose.int(getitem, -1, -2)  # float32[2, 2, 6, 16]
    matmul = torch.ops.aten.matmul.default(q, transpose_1)  # float32[2, 2, 1, 16]
    mul = torch.ops.aten.mul.Tensor(matmul, 0.3)  # float32[2, 2, 1, 16]
    unsqueeze = torch.ops.aten.unsqueeze.default(le, 1)  # bool[2, 1, 1, 16]
    bitwise_not = torch.ops.aten.bitwise_not.default(unsqueeze)  # bool[2, 1, 1, 16]
    masked_fill = torch.ops.aten.masked_fill.Scalar(mul, bitwise_not, float("-inf"))  # float32[2, 2, 1, 16]
    softmax = torch.ops.aten.softmax.int(masked_fill, -1)  # float32[2, 2, 1, 16]
    matmul_1 = torch.ops.aten.matmul.default(softmax, getitem_1)  # float32[2, 2, 1, 5]
    return (matmul_1,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(q, latent, rope, kv_b, index_q, index_keys, index_weights, lengths):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(lengths, 1)  # int32[2]
# CHECK-NEXT:     view_2 = torch.ops.aten.view.default(kv_b, [2, 11, 12])  # float32[2, 11, 12]
# CHECK-NEXT:     slice_1 = torch.ops.aten.slice.Tensor(view_2, 1, 0, 6)  # float32[2, 6, 12]
# CHECK-NEXT:     slice_2 = torch.ops.aten.slice.Tensor(view_2, 1, 6, 11); del view_2  # float32[2, 5, 12]
# CHECK-NEXT:     permute = torch.ops.aten.permute.default(q, [1, 0, 2, 3])  # float32[2, 2, 1, 6]
# CHECK-NEXT:     reshape = torch.ops.aten.reshape.default(permute, [2, 2, 6]); del permute  # float32[2, 2, 6]
# CHECK-NEXT:     bmm = torch.ops.aten.bmm.default(reshape, slice_1); del reshape, slice_1  # float32[2, 2, 12]
# CHECK-NEXT:     transpose_2 = torch.ops.aten.transpose.int(bmm, 0, 1); del bmm  # float32[2, 2, 12]
# CHECK-NEXT:     view_3 = torch.ops.aten.view.default(transpose_2, [2, 1, 2, 12]); del transpose_2  # float32[2, 1, 2, 12]
# CHECK-NEXT:     latent_attention = torch.ops.kimigraph.latent_attention.default(view_3, None, latent, None, add, scale=0.3, descriptor=''); del view_3, add  # (float32[2, 1, 2, 12], float32[2, 1, 2]); replaces 3 nodes, matmul to matmul_1
# CHECK-NEXT:     getitem_2 = latent_attention[0]; del latent_attention  # float32[2, 1, 2, 12]
# CHECK-NEXT:     view_4 = torch.ops.aten.view.default(getitem_2, [2, 2, 12]); del getitem_2  # float32[2, 2, 12]
# CHECK-NEXT:     transpose_3 = torch.ops.aten.transpose.int(view_4, 0, 1); del view_4  # float32[2, 2, 12]
# CHECK-NEXT:     transpose_4 = torch.ops.aten.transpose.int(slice_2, 1, 2); del slice_2  # float32[2, 12, 5]
# CHECK-NEXT:     bmm_1 = torch.ops.aten.bmm.default(transpose_3, transpose_4); del transpose_3, transpose_4  # float32[2, 2, 5]
# CHECK-NEXT:     view_5 = torch.ops.aten.view.default(bmm_1, [2, 2, 1, 5]); del bmm_1  # float32[2, 2, 1, 5]
# CHECK-NEXT:     permute_1 = torch.ops.aten.permute.default(view_5, [1, 0, 2, 3]); del view_5  # float32[2, 2, 1, 5]
# CHECK-NEXT:     return (permute_1,)
