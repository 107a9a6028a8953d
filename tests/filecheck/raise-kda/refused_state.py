# RUN: python -m kimigraph.tools.opt %s --passes raise-kda --remarks | filecheck --match-full-lines %s
"""The new state is used once more: nothing changes."""

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
    InputSpec("state", "cache", "state", (2, 2, 4, 3), (24, 12, 3, 1), "float32", mutated=True),
    InputSpec("out_gate", "input", "out_gate", (2, 1, 2, 3), (6, 6, 3, 1), "float32"),
    InputSpec("norm_weight", "input", "norm_weight", (3,), (1,), "float32"),
)
OUTPUTS = ("mul_12", "sum_5")
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
    unsqueeze_2 = torch.ops.aten.unsqueeze.default(exp_1, -1)  # float32[2, 2, 4, 1]
    mul_5 = torch.ops.aten.mul.Tensor(state, unsqueeze_2)  # float32[2, 2, 4, 3]
    unsqueeze_3 = torch.ops.aten.unsqueeze.default(mul_4, -1)  # float32[2, 2, 4, 1]
    mul_6 = torch.ops.aten.mul.Tensor(mul_5, unsqueeze_3)  # float32[2, 2, 4, 3]
    sum_3 = torch.ops.aten.sum.dim_IntList(mul_6, [-2])  # float32[2, 2, 3]
    sub = torch.ops.aten.sub.Tensor(view_2, sum_3)  # float32[2, 2, 3]
    mul_7 = torch.ops.aten.mul.Tensor(sub, unsqueeze_1)  # float32[2, 2, 3]
    unsqueeze_5 = torch.ops.aten.unsqueeze.default(mul_7, -2)  # float32[2, 2, 1, 3]
    mul_8 = torch.ops.aten.mul.Tensor(unsqueeze_3, unsqueeze_5)  # float32[2, 2, 4, 3]
    add_3 = torch.ops.aten.add.Tensor(mul_5, mul_8)  # float32[2, 2, 4, 3]
    unsqueeze_6 = torch.ops.aten.unsqueeze.default(mul_3, -1)  # float32[2, 2, 4, 1]
    mul_9 = torch.ops.aten.mul.Tensor(add_3, unsqueeze_6)  # float32[2, 2, 4, 3]
    sum_4 = torch.ops.aten.sum.dim_IntList(mul_9, [-2])  # float32[2, 2, 3]
    unsqueeze_7 = torch.ops.aten.unsqueeze.default(sum_4, 1)  # float32[2, 1, 2, 3]
    torch.ops.aten.copy_.default(state, add_3)  # float32[2, 2, 4, 3]; writes state
    square_2 = torch.ops.aten.square.default(unsqueeze_7)  # float32[2, 1, 2, 3]
    mean = torch.ops.aten.mean.dim(square_2, [-1], True)  # float32[2, 1, 2, 1]
    add_4 = torch.ops.aten.add.Tensor(mean, 1e-05)  # float32[2, 1, 2, 1]
    rsqrt_2 = torch.ops.aten.rsqrt.default(add_4)  # float32[2, 1, 2, 1]
    mul_10 = torch.ops.aten.mul.Tensor(unsqueeze_7, rsqrt_2)  # float32[2, 1, 2, 3]
    mul_11 = torch.ops.aten.mul.Tensor(mul_10, norm_weight)  # float32[2, 1, 2, 3]
    sigmoid_2 = torch.ops.aten.sigmoid.default(out_gate)  # float32[2, 1, 2, 3]
    mul_12 = torch.ops.aten.mul.Tensor(mul_11, sigmoid_2)  # float32[2, 1, 2, 3]
    sum_5 = torch.ops.aten.sum.dim_IntList(add_3, [-1])  # float32[2, 2, 4]
    return (mul_12, sum_5)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     transpose = torch.ops.aten.transpose.int(qkv, 1, 2)  # float32[2, 22, 1]
# CHECK-NEXT:     cat = torch.ops.aten.cat.default([conv_state, transpose], -1); del transpose  # float32[2, 22, 4]
# CHECK-NEXT:     conv1d = torch.ops.aten.conv1d.default(cat, conv_weight, None, [1], [0], [1], 22)  # float32[2, 22, 1]
# CHECK-NEXT:     select = torch.ops.aten.select.int(conv1d, 2, -1); del conv1d  # float32[2, 22]
# CHECK-NEXT:     silu = torch.ops.aten.silu.default(select); del select  # float32[2, 22]
# CHECK-NEXT:     slice_1 = torch.ops.aten.slice.Tensor(cat, 2, -3, 9223372036854775807); del cat  # float32[2, 22, 3]
# CHECK-NEXT:     torch.ops.aten.copy_.default(conv_state, slice_1); del slice_1  # float32[2, 22, 3]; writes conv_state
# CHECK-NEXT:     split_with_sizes = torch.ops.aten.split_with_sizes.default(silu, [8, 8, 6], -1); del silu  # (float32[2, 8], float32[2, 8], float32[2, 6])
# CHECK-NEXT:     getitem = split_with_sizes[0]  # float32[2, 8]
# CHECK-NEXT:     getitem_1 = split_with_sizes[1]  # float32[2, 8]
# CHECK-NEXT:     getitem_2 = split_with_sizes[2]; del split_with_sizes  # float32[2, 6]
# CHECK-NEXT:     view = torch.ops.aten.view.default(getitem, [2, 2, 4]); del getitem  # float32[2, 2, 4]
# CHECK-NEXT:     view_1 = torch.ops.aten.view.default(getitem_1, [2, 2, 4]); del getitem_1  # float32[2, 2, 4]
# CHECK-NEXT:     view_2 = torch.ops.aten.view.default(getitem_2, [2, 2, 3]); del getitem_2  # float32[2, 2, 3]
# CHECK-NEXT:     exp = torch.ops.aten.exp.default(a_log)  # float32[2]
# CHECK-NEXT:     unsqueeze = torch.ops.aten.unsqueeze.default(exp, -1); del exp  # float32[2, 1]
# CHECK-NEXT:     select_1 = torch.ops.aten.select.int(gate, 1, 0)  # float32[2, 8]
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(select_1, dt_bias); del select_1  # float32[2, 8]
# CHECK-NEXT:     view_3 = torch.ops.aten.view.default(add, [2, 2, 4]); del add  # float32[2, 2, 4]
# CHECK-NEXT:     mul = torch.ops.aten.mul.Tensor(unsqueeze, view_3); del unsqueeze, view_3  # float32[2, 2, 4]
# CHECK-NEXT:     sigmoid = torch.ops.aten.sigmoid.default(mul); del mul  # float32[2, 2, 4]
# CHECK-NEXT:     mul_1 = torch.ops.aten.mul.Tensor(sigmoid, -5.0); del sigmoid  # float32[2, 2, 4]
# CHECK-NEXT:     select_2 = torch.ops.aten.select.int(beta, 1, 0)  # float32[2, 2]
# CHECK-NEXT:     sigmoid_1 = torch.ops.aten.sigmoid.default(select_2); del select_2  # float32[2, 2]
# CHECK-NEXT:     unsqueeze_1 = torch.ops.aten.unsqueeze.default(sigmoid_1, -1); del sigmoid_1  # float32[2, 2, 1]
# CHECK-NEXT:     square = torch.ops.aten.square.default(view)  # float32[2, 2, 4]
# CHECK-NEXT:     sum_1 = torch.ops.aten.sum.dim_IntList(square, [-1], True); del square  # float32[2, 2, 1]
# CHECK-NEXT:     add_1 = torch.ops.aten.add.Tensor(sum_1, 1e-06); del sum_1  # float32[2, 2, 1]
# CHECK-NEXT:     rsqrt = torch.ops.aten.rsqrt.default(add_1); del add_1  # float32[2, 2, 1]
# CHECK-NEXT:     mul_2 = torch.ops.aten.mul.Tensor(view, rsqrt); del view, rsqrt  # float32[2, 2, 4]
# CHECK-NEXT:     mul_3 = torch.ops.aten.mul.Tensor(mul_2, 0.5); del mul_2  # float32[2, 2, 4]
# CHECK-NEXT:     square_1 = torch.ops.aten.square.default(view_1)  # float32[2, 2, 4]
# CHECK-NEXT:     sum_2 = torch.ops.aten.sum.dim_IntList(square_1, [-1], True); del square_1  # float32[2, 2, 1]
# CHECK-NEXT:     add_2 = torch.ops.aten.add.Tensor(sum_2, 1e-06); del sum_2  # float32[2, 2, 1]
# CHECK-NEXT:     rsqrt_1 = torch.ops.aten.rsqrt.default(add_2); del add_2  # float32[2, 2, 1]
# CHECK-NEXT:     mul_4 = torch.ops.aten.mul.Tensor(view_1, rsqrt_1); del view_1, rsqrt_1  # float32[2, 2, 4]
# CHECK-NEXT:     exp_1 = torch.ops.aten.exp.default(mul_1); del mul_1  # float32[2, 2, 4]
# CHECK-NEXT:     unsqueeze_2 = torch.ops.aten.unsqueeze.default(exp_1, -1); del exp_1  # float32[2, 2, 4, 1]
# CHECK-NEXT:     mul_5 = torch.ops.aten.mul.Tensor(state, unsqueeze_2); del unsqueeze_2  # float32[2, 2, 4, 3]
# CHECK-NEXT:     unsqueeze_3 = torch.ops.aten.unsqueeze.default(mul_4, -1); del mul_4  # float32[2, 2, 4, 1]
# CHECK-NEXT:     mul_6 = torch.ops.aten.mul.Tensor(mul_5, unsqueeze_3)  # float32[2, 2, 4, 3]
# CHECK-NEXT:     sum_3 = torch.ops.aten.sum.dim_IntList(mul_6, [-2]); del mul_6  # float32[2, 2, 3]
# CHECK-NEXT:     sub = torch.ops.aten.sub.Tensor(view_2, sum_3); del view_2, sum_3  # float32[2, 2, 3]
# CHECK-NEXT:     mul_7 = torch.ops.aten.mul.Tensor(sub, unsqueeze_1); del sub, unsqueeze_1  # float32[2, 2, 3]
# CHECK-NEXT:     unsqueeze_5 = torch.ops.aten.unsqueeze.default(mul_7, -2); del mul_7  # float32[2, 2, 1, 3]
# CHECK-NEXT:     mul_8 = torch.ops.aten.mul.Tensor(unsqueeze_3, unsqueeze_5); del unsqueeze_3, unsqueeze_5  # float32[2, 2, 4, 3]
# CHECK-NEXT:     add_3 = torch.ops.aten.add.Tensor(mul_5, mul_8); del mul_5, mul_8  # float32[2, 2, 4, 3]
# CHECK-NEXT:     unsqueeze_6 = torch.ops.aten.unsqueeze.default(mul_3, -1); del mul_3  # float32[2, 2, 4, 1]
# CHECK-NEXT:     mul_9 = torch.ops.aten.mul.Tensor(add_3, unsqueeze_6); del unsqueeze_6  # float32[2, 2, 4, 3]
# CHECK-NEXT:     sum_4 = torch.ops.aten.sum.dim_IntList(mul_9, [-2]); del mul_9  # float32[2, 2, 3]
# CHECK-NEXT:     unsqueeze_7 = torch.ops.aten.unsqueeze.default(sum_4, 1); del sum_4  # float32[2, 1, 2, 3]
# CHECK-NEXT:     torch.ops.aten.copy_.default(state, add_3)  # float32[2, 2, 4, 3]; writes state
# CHECK-NEXT:     square_2 = torch.ops.aten.square.default(unsqueeze_7)  # float32[2, 1, 2, 3]
# CHECK-NEXT:     mean = torch.ops.aten.mean.dim(square_2, [-1], True); del square_2  # float32[2, 1, 2, 1]
# CHECK-NEXT:     add_4 = torch.ops.aten.add.Tensor(mean, 1e-05); del mean  # float32[2, 1, 2, 1]
# CHECK-NEXT:     rsqrt_2 = torch.ops.aten.rsqrt.default(add_4); del add_4  # float32[2, 1, 2, 1]
# CHECK-NEXT:     mul_10 = torch.ops.aten.mul.Tensor(unsqueeze_7, rsqrt_2); del unsqueeze_7, rsqrt_2  # float32[2, 1, 2, 3]
# CHECK-NEXT:     mul_11 = torch.ops.aten.mul.Tensor(mul_10, norm_weight); del mul_10  # float32[2, 1, 2, 3]
# CHECK-NEXT:     sigmoid_2 = torch.ops.aten.sigmoid.default(out_gate)  # float32[2, 1, 2, 3]
# CHECK-NEXT:     mul_12 = torch.ops.aten.mul.Tensor(mul_11, sigmoid_2); del mul_11, sigmoid_2  # float32[2, 1, 2, 3]
# CHECK-NEXT:     sum_5 = torch.ops.aten.sum.dim_IntList(add_3, [-1]); del add_3  # float32[2, 2, 4]
# CHECK-NEXT:     return (mul_12, sum_5)
# CHECK: # missed raise-kda at sum_5: copy__default_1: state is used elsewhere, by sum_5
