# RUN: python -m kimigraph.tools.opt %s --passes fuse-sparse-attention --remarks | filecheck --match-full-lines %s
"""No picks, all keys: there is no operator for that."""

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
    split_with_sizes = torch.ops.aten.split_with_sizes.default(transpose, [6, 5], -1)  # (float32[2, 2, 16, 6], float32[2, 2, 16, 5])
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
# CHECK-NEXT:     arange = torch.ops.aten.arange.default(16, device=torch.device("cpu"), pin_memory=False)  # int64[16]
# CHECK-NEXT:     view = torch.ops.aten.view.default(lengths, [2, 1, 1])  # int32[2, 1, 1]
# CHECK-NEXT:     le = torch.ops.aten.le.Tensor(arange, view); del arange, view  # bool[2, 1, 16]
# CHECK-NEXT:     linear = torch.ops.aten.linear.default(latent, kv_b)  # float32[2, 16, 22]
# CHECK-NEXT:     view_1 = torch.ops.aten.view.default(linear, [2, 16, 2, 11]); del linear  # float32[2, 16, 2, 11]
# CHECK-NEXT:     transpose = torch.ops.aten.transpose.int(view_1, 1, 2); del view_1  # float32[2, 2, 16, 11]
# CHECK-NEXT:     split_with_sizes = torch.ops.aten.split_with_sizes.default(transpose, [6, 5], -1); del transpose  # (float32[2, 2, 16, 6], float32[2, 2, 16, 5])
# CHECK-NEXT:     getitem = split_with_sizes[0]  # float32[2, 2, 16, 6]
# CHECK-NEXT:     getitem_1 = split_with_sizes[1]; del split_with_sizes  # float32[2, 2, 16, 5]
# CHECK-NEXT:     transpose_1 = torch.ops.aten.transpose.int(getitem, -1, -2); del getitem  # float32[2, 2, 6, 16]
# CHECK-NEXT:     matmul = torch.ops.aten.matmul.default(q, transpose_1); del transpose_1  # float32[2, 2, 1, 16]
# CHECK-NEXT:     mul = torch.ops.aten.mul.Tensor(matmul, 0.3); del matmul  # float32[2, 2, 1, 16]
# CHECK-NEXT:     unsqueeze = torch.ops.aten.unsqueeze.default(le, 1); del le  # bool[2, 1, 1, 16]
# CHECK-NEXT:     bitwise_not = torch.ops.aten.bitwise_not.default(unsqueeze); del unsqueeze  # bool[2, 1, 1, 16]
# CHECK-NEXT:     masked_fill = torch.ops.aten.masked_fill.Scalar(mul, bitwise_not, float("-inf")); del mul, bitwise_not  # float32[2, 2, 1, 16]
# CHECK-NEXT:     softmax = torch.ops.aten.softmax.int(masked_fill, -1); del masked_fill  # float32[2, 2, 1, 16]
# CHECK-NEXT:     matmul_1 = torch.ops.aten.matmul.default(softmax, getitem_1); del softmax, getitem_1  # float32[2, 2, 1, 5]
# CHECK-NEXT:     return (matmul_1,)
# CHECK: # missed fuse-sparse-attention at softmax: softmax: dense latent attention has no operator yet
