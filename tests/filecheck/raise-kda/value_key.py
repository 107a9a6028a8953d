# RUN: python -m kimigraph.tools.opt %s --passes raise-kda | filecheck --match-full-lines %s
"""State [B, H, V, K], no norm and no output gate."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("qkv", "input", "qkv", (2, 1, 22), (22, 22, 1), "float32"),
    InputSpec("conv_weight", "input", "conv_weight", (22, 1, 4), (4, 4, 1), "float32"),
    InputSpec("conv_state", "cache", "conv_state", (2, 22, 3), (66, 3, 1), "float32", mutated=True),
    InputSpec("gate", "input", "gate", (2, 1, 8), (8, 8, 1), "float32"),
    InputSpec("dt_bias", "input", "dt_bias", (8,), (1,), "float32"),
    InputSpec("a_log", "input", "a_log", (2,), (1,), "float32"),
    InputSpec("beta", "input", "beta", (2, 1, 2), (2, 2, 1), "float32"),
    InputSpec("state", "cache", "state", (2, 2, 3, 4), (24, 12, 4, 1), "float32", mutated=True),
    InputSpec("out_gate", "input", "out_gate", (2, 1, 2, 3), (6, 6, 3, 1), "float32"),
    InputSpec("norm_weight", "input", "norm_weight", (3,), (1,), "float32"),
)
OUTPUTS = ("unsqueeze_7",)
CONSTANTS = {}


@torch.no_grad()
def step(qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight):
    transpose = torch.ops.aten.transpose.int(qkv, 1, 2)  # float32[2, 22, 1]
    cat = torch.ops.aten.cat.default([conv_state, transpose], -1)  # float32[2, 22, 4]
    conv1d = torch.ops.aten.conv1d.default(cat, conv_weight, None, [1], [0], [1], 22)  # float32[2, 22, 1]
    select = torch.ops.aten.select.int(conv1d, 2, -1)  # float32[2, 22]
    silu = torch.ops.aten.silu.default(select)  # float32[2, 22]
    slice_1 = torch.ops.aten.slice.Tensor(cat, 2, -3, 9223372036854775807)  # float32[2, 22, 3]
    torch.ops.aten.copy_.default(conv_state, slice_1)  # float32[2, 22, 3]; writes conv_state
    split_with_sizes = torch.ops.aten.split_with_sizes.default(silu, [8, 8, 6], -1)  # (float32[2, 8], float32[2, 8], float32[2, 6])
    getitem = split_with_sizes[0]  # float32[2, 8]
    getitem_1 = split_with_sizes[1]  # float32[2, 8]
    getitem_2 = split_with_sizes[2]  # float32[2, 6]
    view = torch.ops.aten.view.default(getitem, [2, 2, 4])  # float32[2, 2, 4]
    view_1 = torch.ops.aten.view.default(getitem_1, [2, 2, 4])  # float32[2, 2, 4]
    view_2 = torch.ops.aten.view.default(getitem_2, [2, 2, 3])  # float32[2, 2, 3]
    exp = torch.ops.aten.exp.default(a_log)  # float32[2]
    unsqueeze = torch.ops.aten.unsqueeze.default(exp, -1)  # float32[2, 1]
    select_1 = torch.ops.aten.select.int(gate, 1, 0)  # float32[2, 8]
    add = torch.ops.aten.add.Tensor(select_1, dt_bias)  # float32[2, 8]
    view_3 = torch.ops.aten.view.default(add, [2, 2, 4])  # float32[2, 2, 4]
    mul = torch.ops.aten.mul.Tensor(unsqueeze, view_3)  # float32[2, 2, 4]
    sigmoid = torch.ops.aten.sigmoid.default(mul)  # float32[2, 2, 4]
    mul_1 = torch.ops.aten.mul.Tensor(sigmoid, -5.0)  # float32[2, 2, 4]
    select_2 = torch.ops.aten.select.int(beta, 1, 0)  # float32[2, 2]
    sigmoid_1 = torch.ops.aten.sigmoid.default(select_2)  # float32[2, 2]
    unsqueeze_1 = torch.ops.aten.unsqueeze.default(sigmoid_1, -1)  # float32[2, 2, 1]
    square = torch.ops.aten.square.default(view)  # float32[2, 2, 4]
    sum_1 = torch.ops.aten.sum.dim_IntList(square, [-1], True)  # float32[2, 2, 1]
    add_1 = torch.ops.aten.add.Tensor(sum_1, 1e-06)  # float32[2, 2, 1]
    rsqrt = torch.ops.aten.rsqrt.default(add_1)  # float32[2, 2, 1]
    mul_2 = torch.ops.aten.mul.Tensor(view, rsqrt)  # float32[2, 2, 4]
    mul_3 = torch.ops.aten.mul.Tensor(mul_2, 0.5)  # float32[2, 2, 4]
    square_1 = torch.ops.aten.square.default(view_1)  # float32[2, 2, 4]
    sum_2 = torch.ops.aten.sum.dim_IntList(square_1, [-1], True)  # float32[2, 2, 1]
    add_2 = torch.ops.aten.add.Tensor(sum_2, 1e-06)  # float32[2, 2, 1]
    rsqrt_1 = torch.ops.aten.rsqrt.default(add_2)  # float32[2, 2, 1]
    mul_4 = torch.ops.aten.mul.Tensor(view_1, rsqrt_1)  # float32[2, 2, 4]
    exp_1 = torch.ops.aten.exp.default(mul_1)  # float32[2, 2, 4]
    unsqueeze_2 = torch.ops.aten.unsqueeze.default(exp_1, -2)  # float32[2, 2, 1, 4]
    mul_5 = torch.ops.aten.mul.Tensor(state, unsqueeze_2)  # float32[2, 2, 3, 4]
    unsqueeze_3 = torch.ops.aten.unsqueeze.default(mul_4, -2)  # float32[2, 2, 1, 4]
    mul_6 = torch.ops.aten.mul.Tensor(mul_5, unsqueeze_3)  # float32[2, 2, 3, 4]
    sum_3 = torch.ops.aten.sum.dim_IntList(mul_6, [-1])  # float32[2, 2, 3]
    sub = torch.ops.aten.sub.Tensor(view_2, sum_3)  # float32[2, 2, 3]
    mul_7 = torch.ops.aten.mul.Tensor(sub, unsqueeze_1)  # float32[2, 2, 3]
    unsqueeze_5 = torch.ops.aten.unsqueeze.default(mul_7, -1)  # float32[2, 2, 3, 1]
    mul_8 = torch.ops.aten.mul.Tensor(unsqueeze_3, unsqueeze_5)  # float32[2, 2, 3, 4]
    add_3 = torch.ops.aten.add.Tensor(mul_5, mul_8)  # float32[2, 2, 3, 4]
    unsqueeze_6 = torch.ops.aten.unsqueeze.default(mul_3, -2)  # float32[2, 2, 1, 4]
    mul_9 = torch.ops.aten.mul.Tensor(add_3, unsqueeze_6)  # float32[2, 2, 3, 4]
    sum_4 = torch.ops.aten.sum.dim_IntList(mul_9, [-1])  # float32[2, 2, 3]
    unsqueeze_7 = torch.ops.aten.unsqueeze.default(sum_4, 1)  # float32[2, 1, 2, 3]
    torch.ops.aten.copy_.default(state, add_3)  # float32[2, 2, 3, 4]; writes state
    return (unsqueeze_7,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     kda_decode = torch.ops.kimigraph.kda_decode.default(qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, None, None, scale=0.5, l2_eps=1e-06, lower_bound=-5.0, norm_eps=1e-05, state_layout='vk')  # float32[2, 1, 2, 3]; writes conv_state, state; replaces 5 nodes, silu to copy__default_1
# CHECK-NEXT:     view_4 = torch.ops.aten.view.default(kda_decode, [2, 2, 3]); del kda_decode  # float32[2, 2, 3]
# CHECK-NEXT:     unsqueeze_7 = torch.ops.aten.unsqueeze.default(view_4, 1); del view_4  # float32[2, 1, 2, 3]
# CHECK-NEXT:     return (unsqueeze_7,)
