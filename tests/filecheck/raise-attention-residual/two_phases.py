# RUN: python -m kimigraph.tools.opt %s --passes 'raise-attention-residual{phases=two}' --remarks | filecheck --match-full-lines %s
"""Two sublayers share a finished block: it is mixed once, under both queries."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("block", "input", "block", (2, 1, 6), (6, 6, 1), "float32"),
    InputSpec("partial", "input", "partial", (2, 1, 6), (6, 6, 1), "float32"),
    InputSpec("query", "input", "query", (1, 6), (6, 1), "float32"),
    InputSpec("norm_weight", "input", "norm_weight", (6,), (1,), "float32"),
    InputSpec("out_norm_weight", "input", "out_norm_weight", (6,), (1,), "float32"),
    InputSpec("query_1", "input", "query_1", (1, 6), (6, 1), "float32"),
    InputSpec("norm_weight_1", "input", "norm_weight_1", (6,), (1,), "float32"),
    InputSpec("out_norm_weight_1", "input", "out_norm_weight_1", (6,), (1,), "float32"),
)
OUTPUTS = ("normed_1",)
CONSTANTS = {}


@torch.no_grad()
def step(block, partial, query, norm_weight, out_norm_weight, query_1, norm_weight_1, out_norm_weight_1):
    stack = torch.ops.aten.stack.default([block, partial])
    squeeze = torch.ops.aten.squeeze.dim(query, 0)
    effective = torch.ops.aten.mul.Tensor(squeeze, norm_weight)
    products = torch.ops.aten.mul.Tensor(stack, effective)
    dot = torch.ops.aten.sum.dim_IntList(products, [-1])
    square = torch.ops.aten.square.default(stack)
    mean = torch.ops.aten.mean.dim(square, [-1])
    shifted = torch.ops.aten.add.Tensor(mean, 1e-05)
    root = torch.ops.aten.rsqrt.default(shifted)
    logits = torch.ops.aten.mul.Tensor(dot, root)
    softmax = torch.ops.aten.softmax.int(logits, 0)
    unsqueeze = torch.ops.aten.unsqueeze.default(softmax, -1)
    weighted = torch.ops.aten.mul.Tensor(unsqueeze, stack)
    mixed = torch.ops.aten.sum.dim_IntList(weighted, [0])
    out_square = torch.ops.aten.square.default(mixed)
    out_mean = torch.ops.aten.mean.dim(out_square, [-1], True)
    out_shifted = torch.ops.aten.add.Tensor(out_mean, 1e-05)
    out_root = torch.ops.aten.rsqrt.default(out_shifted)
    unit = torch.ops.aten.mul.Tensor(mixed, out_root)
    normed = torch.ops.aten.mul.Tensor(unit, out_norm_weight)
    advanced = torch.ops.aten.add.Tensor(partial, normed)
    stack_1 = torch.ops.aten.stack.default([block, advanced])
    squeeze_1 = torch.ops.aten.squeeze.dim(query_1, 0)
    effective_1 = torch.ops.aten.mul.Tensor(squeeze_1, norm_weight_1)
    products_1 = torch.ops.aten.mul.Tensor(stack_1, effective_1)
    dot_1 = torch.ops.aten.sum.dim_IntList(products_1, [-1])
    square_1 = torch.ops.aten.square.default(stack_1)
    mean_1 = torch.ops.aten.mean.dim(square_1, [-1])
    shifted_1 = torch.ops.aten.add.Tensor(mean_1, 1e-05)
    root_1 = torch.ops.aten.rsqrt.default(shifted_1)
    logits_1 = torch.ops.aten.mul.Tensor(dot_1, root_1)
    softmax_1 = torch.ops.aten.softmax.int(logits_1, 0)
    unsqueeze_1 = torch.ops.aten.unsqueeze.default(softmax_1, -1)
    weighted_1 = torch.ops.aten.mul.Tensor(unsqueeze_1, stack_1)
    mixed_1 = torch.ops.aten.sum.dim_IntList(weighted_1, [0])
    out_square_1 = torch.ops.aten.square.default(mixed_1)
    out_mean_1 = torch.ops.aten.mean.dim(out_square_1, [-1], True)
    out_shifted_1 = torch.ops.aten.add.Tensor(out_mean_1, 1e-05)
    out_root_1 = torch.ops.aten.rsqrt.default(out_shifted_1)
    unit_1 = torch.ops.aten.mul.Tensor(mixed_1, out_root_1)
    normed_1 = torch.ops.aten.mul.Tensor(unit_1, out_norm_weight_1)
    return (normed_1,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(block, partial, query, norm_weight, out_norm_weight, query_1, norm_weight_1, out_norm_weight_1):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     squeeze = torch.ops.aten.squeeze.dim(query, 0)  # float32[6]
# CHECK-NEXT:     view = torch.ops.aten.view.default(query_1, [6])  # float32[6]
# CHECK-NEXT:     attention_residual_history = torch.ops.kimigraph.attention_residual_history.default([block], [squeeze, view], [norm_weight, norm_weight_1], eps=1e-05); del view  # (float32[2, 2, 1, 6], float32[2, 2, 1])
# CHECK-NEXT:     getitem = attention_residual_history[0]  # float32[2, 2, 1, 6]
# CHECK-NEXT:     getitem_1 = attention_residual_history[1]; del attention_residual_history  # float32[2, 2, 1]
# CHECK-NEXT:     select = torch.ops.aten.select.int(getitem, 0, 0)  # float32[2, 1, 6]
# CHECK-NEXT:     select_1 = torch.ops.aten.select.int(getitem_1, 0, 0)  # float32[2, 1]
# CHECK-NEXT:     attention_residual_merge = torch.ops.kimigraph.attention_residual_merge.default(select, select_1, partial, squeeze, norm_weight, out_norm_weight, eps=1e-05, out_eps=1e-05); del squeeze, select, select_1  # float32[2, 1, 6]; replaces 6 nodes, stack to out_root
# CHECK-NEXT:     advanced = torch.ops.aten.add.Tensor(partial, attention_residual_merge); del attention_residual_merge  # float32[2, 1, 6]
# CHECK-NEXT:     squeeze_1 = torch.ops.aten.squeeze.dim(query_1, 0)  # float32[6]
# CHECK-NEXT:     select_2 = torch.ops.aten.select.int(getitem, 0, 1); del getitem  # float32[2, 1, 6]
# CHECK-NEXT:     select_3 = torch.ops.aten.select.int(getitem_1, 0, 1); del getitem_1  # float32[2, 1]
# CHECK-NEXT:     attention_residual_merge_1 = torch.ops.kimigraph.attention_residual_merge.default(select_2, select_3, advanced, squeeze_1, norm_weight_1, out_norm_weight_1, eps=1e-05, out_eps=1e-05); del select_2, select_3, advanced, squeeze_1  # float32[2, 1, 6]; replaces 6 nodes, stack_1 to out_root_1
# CHECK-NEXT:     return (attention_residual_merge_1,)
# CHECK: # passed raise-attention-residual at attention_residual_merge: stack, dot, root, softmax, mixed, out_root became attention_residual_merge
# CHECK: # passed raise-attention-residual at attention_residual_merge_1: stack_1, dot_1, root_1, softmax_1, mixed_1, out_root_1 became attention_residual_merge_1
# CHECK: # note raise-attention-residual at attention_residual_merge: 2 sublayers over 1 finished block are mixed in two phases: two phases 3.44 us, one pass each 2.29 us on NVIDIA H200
