# RUN: python -m kimigraph.tools.opt %s --passes raise-cache-writes | filecheck --match-full-lines %s
"""Index keys are normed and turned before they are written; latent and rope part are written one after the other."""

import torch

import kimigraph.ir.operators
from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

LATENT = "latent{layout=contiguous,dtype=float32,width=6,rope_dim=4,page_size=0,buffers=2}"
KEYS = "index_key{layout=contiguous,dtype=float32,width=8,page_size=0}"
INPUTS = (
    InputSpec("latent", "cache", "cache.0.latent", (2, 1, 16, 6), (96, 96, 6, 1), "float32", descriptor=LATENT, mutated=True),
    InputSpec("rope", "cache", "cache.0.rope", (2, 1, 16, 4), (64, 64, 4, 1), "float32", descriptor=LATENT, mutated=True),
    InputSpec("keys", "cache", "cache.0.index_key", (2, 16, 8), (128, 8, 1), "float32", descriptor=KEYS, mutated=True),
    InputSpec("length", "input", "length", (), (), "int64", value_range=(0, 13)),
    InputSpec("new", "input", "new", (2, 3, 10), (30, 10, 1), "float32"),
    InputSpec("key", "input", "key", (2, 3, 8), (24, 8, 1), "float32"),
    InputSpec("weight", "weight", "weight", (8,), (1,), "float32"),
    InputSpec("bias", "weight", "bias", (8,), (1,), "float32"),
    InputSpec("angles", "input", "angles", (1, 3, 2), (6, 2, 1), "float32"),
)
OUTPUTS = ("add_3",)
CONSTANTS = {}


@torch.no_grad()
def step(latent, rope, keys, length, new, key, weight, bias, angles):
    arange = torch.ops.aten.arange.default(3, device=torch.device("cpu"), pin_memory=False)  # int64[3]
    add = torch.ops.aten.add.Tensor(arange, length)  # int64[3]
    cos = torch.ops.aten.cos.default(angles)  # float32[1, 3, 2]
    sin = torch.ops.aten.sin.default(angles)  # float32[1, 3, 2]
    split = torch.ops.aten.split_with_sizes.default(new, [6, 4], -1)  # (float32[2, 3, 6], float32[2, 3, 4])
    getitem = split[0]  # float32[2, 3, 6]
    getitem_1 = split[1]  # float32[2, 3, 4]
    view = torch.ops.aten.view.default(getitem, [2, 1, 3, 6])  # float32[2, 1, 3, 6]
    index_copy = torch.ops.aten.index_copy_.default(latent, 2, add, view)  # float32[2, 1, 16, 6]
    view_1 = torch.ops.aten.view.default(getitem_1, [2, 1, 3, 4])  # float32[2, 1, 3, 4]
    even = torch.ops.aten.slice.Tensor(view_1, 3, 0, 9223372036854775807, 2)  # float32[2, 1, 3, 2]
    odd = torch.ops.aten.slice.Tensor(view_1, 3, 1, 9223372036854775807, 2)  # float32[2, 1, 3, 2]
    unsqueeze = torch.ops.aten.unsqueeze.default(cos, 1)  # float32[1, 1, 3, 2]
    unsqueeze_1 = torch.ops.aten.unsqueeze.default(sin, 1)  # float32[1, 1, 3, 2]
    mul = torch.ops.aten.mul.Tensor(even, unsqueeze)  # float32[2, 1, 3, 2]
    mul_1 = torch.ops.aten.mul.Tensor(odd, unsqueeze_1)  # float32[2, 1, 3, 2]
    sub = torch.ops.aten.sub.Tensor(mul, mul_1)  # float32[2, 1, 3, 2]
    mul_2 = torch.ops.aten.mul.Tensor(odd, unsqueeze)  # float32[2, 1, 3, 2]
    mul_3 = torch.ops.aten.mul.Tensor(even, unsqueeze_1)  # float32[2, 1, 3, 2]
    add_1 = torch.ops.aten.add.Tensor(mul_2, mul_3)  # float32[2, 1, 3, 2]
    cat = torch.ops.aten.cat.default([sub, add_1], -1)  # float32[2, 1, 3, 4]
    index_copy_1 = torch.ops.aten.index_copy_.default(rope, 2, add, cat)  # float32[2, 1, 16, 4]
    layer_norm = torch.ops.aten.layer_norm.default(key, [8], weight, bias, 1e-06, False)  # float32[2, 3, 8]
    turned = torch.ops.aten.slice.Tensor(layer_norm, 2, 0, 4)  # float32[2, 3, 4]
    rest = torch.ops.aten.slice.Tensor(layer_norm, 2, 4, 9223372036854775807)  # float32[2, 3, 4]
    cat_1 = torch.ops.aten.cat.default([cos, cos], -1)  # float32[1, 3, 4]
    cat_2 = torch.ops.aten.cat.default([sin, sin], -1)  # float32[1, 3, 4]
    mul_4 = torch.ops.aten.mul.Tensor(turned, cat_1)  # float32[2, 3, 4]
    first = torch.ops.aten.slice.Tensor(turned, 2, 0, 2)  # float32[2, 3, 2]
    second = torch.ops.aten.slice.Tensor(turned, 2, 2, 9223372036854775807)  # float32[2, 3, 2]
    neg = torch.ops.aten.neg.default(second)  # float32[2, 3, 2]
    cat_3 = torch.ops.aten.cat.default([neg, first], -1)  # float32[2, 3, 4]
    mul_5 = torch.ops.aten.mul.Tensor(cat_3, cat_2)  # float32[2, 3, 4]
    add_2 = torch.ops.aten.add.Tensor(mul_4, mul_5)  # float32[2, 3, 4]
    cat_4 = torch.ops.aten.cat.default([add_2, rest], -1)  # float32[2, 3, 8]
    index_copy_2 = torch.ops.aten.index_copy_.default(keys, 1, add, cat_4)  # float32[2, 16, 8]
    sum_1 = torch.ops.aten.sum.default(index_copy)  # float32[]
    sum_2 = torch.ops.aten.sum.default(index_copy_1)  # float32[]
    add_3 = torch.ops.aten.add.Tensor(sum_1, sum_2)  # float32[]
    return (add_3,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(latent, rope, keys, length, new, key, weight, bias, angles):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     arange = torch.ops.aten.arange.default(3, device=torch.device("cpu"), pin_memory=False)  # int64[3]
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(arange, length); del arange  # int64[3]
# CHECK-NEXT:     cos = torch.ops.aten.cos.default(angles)  # float32[1, 3, 2]
# CHECK-NEXT:     sin = torch.ops.aten.sin.default(angles)  # float32[1, 3, 2]
# CHECK-NEXT:     split = torch.ops.aten.split_with_sizes.default(new, [6, 4], -1)  # (float32[2, 3, 6], float32[2, 3, 4])
# CHECK-NEXT:     getitem = split[0]  # float32[2, 3, 6]
# CHECK-NEXT:     getitem_1 = split[1]; del split  # float32[2, 3, 4]
# CHECK-NEXT:     view = torch.ops.aten.view.default(getitem, [2, 1, 3, 6]); del getitem  # float32[2, 1, 3, 6]
# CHECK-NEXT:     view_1 = torch.ops.aten.view.default(getitem_1, [2, 1, 3, 4]); del getitem_1  # float32[2, 1, 3, 4]
# CHECK-NEXT:     unsqueeze = torch.ops.aten.unsqueeze.default(cos, 1)  # float32[1, 1, 3, 2]
# CHECK-NEXT:     unsqueeze_1 = torch.ops.aten.unsqueeze.default(sin, 1)  # float32[1, 1, 3, 2]
# CHECK-NEXT:     expand = torch.ops.aten.expand.default(add, [2, 3])  # int64[2, 3]
# CHECK-NEXT:     squeeze = torch.ops.aten.squeeze.dim(latent, 1)  # float32[2, 16, 6]
# CHECK-NEXT:     squeeze_1 = torch.ops.aten.squeeze.dim(rope, 1)  # float32[2, 16, 4]
# CHECK-NEXT:     reshape = torch.ops.aten.reshape.default(view, [2, 3, 6]); del view  # float32[2, 3, 6]
# CHECK-NEXT:     reshape_1 = torch.ops.aten.reshape.default(view_1, [2, 3, 4]); del view_1  # float32[2, 3, 4]
# CHECK-NEXT:     reshape_2 = torch.ops.aten.reshape.default(unsqueeze, [1, 3, 2]); del unsqueeze  # float32[1, 3, 2]
# CHECK-NEXT:     expand_1 = torch.ops.aten.expand.default(reshape_2, [2, 3, 2]); del reshape_2  # float32[2, 3, 2]
# CHECK-NEXT:     reshape_3 = torch.ops.aten.reshape.default(unsqueeze_1, [1, 3, 2]); del unsqueeze_1  # float32[1, 3, 2]
# CHECK-NEXT:     expand_2 = torch.ops.aten.expand.default(reshape_3, [2, 3, 2]); del reshape_3  # float32[2, 3, 2]
# CHECK-NEXT:     torch.ops.kimigraph.latent_write.default(squeeze, squeeze_1, reshape, reshape_1, expand, expand_1, expand_2, rope_style='deinterleaved', descriptor='latent{layout=contiguous,dtype=float32,width=6,rope_dim=4,page_size=0,buffers=2}'); del squeeze, squeeze_1, reshape, reshape_1, expand, expand_1, expand_2  # without a value; writes latent, rope; replaces 2 nodes, index_copy to index_copy_1
# CHECK-NEXT:     cat_1 = torch.ops.aten.cat.default([cos, cos], -1); del cos  # float32[1, 3, 4]
# CHECK-NEXT:     cat_2 = torch.ops.aten.cat.default([sin, sin], -1); del sin  # float32[1, 3, 4]
# CHECK-NEXT:     expand_3 = torch.ops.aten.expand.default(add, [2, 3]); del add  # int64[2, 3]
# CHECK-NEXT:     slice_1 = torch.ops.aten.slice.Tensor(cat_1, 2, 0, 2); del cat_1  # float32[1, 3, 2]
# CHECK-NEXT:     expand_4 = torch.ops.aten.expand.default(slice_1, [2, 3, 2]); del slice_1  # float32[2, 3, 2]
# CHECK-NEXT:     slice_2 = torch.ops.aten.slice.Tensor(cat_2, 2, 0, 2); del cat_2  # float32[1, 3, 2]
# CHECK-NEXT:     expand_5 = torch.ops.aten.expand.default(slice_2, [2, 3, 2]); del slice_2  # float32[2, 3, 2]
# CHECK-NEXT:     torch.ops.kimigraph.index_key_write.default(keys, key, expand_3, weight, bias, expand_4, expand_5, rope_style='half_split', descriptor='index_key{layout=contiguous,dtype=float32,width=8,page_size=0}', norm_eps=1e-06); del expand_3, expand_4, expand_5  # without a value; writes keys; replaces 2 nodes, index_copy_2 to layer_norm
# CHECK-NEXT:     sum_1 = torch.ops.aten.sum.default(latent)  # float32[]
# CHECK-NEXT:     sum_2 = torch.ops.aten.sum.default(rope)  # float32[]
# CHECK-NEXT:     add_3 = torch.ops.aten.add.Tensor(sum_1, sum_2); del sum_1, sum_2  # float32[]
# CHECK-NEXT:     return (add_3,)
