# RUN: python -m kimigraph.tools.opt %s --passes raise-attention-residual | filecheck --match-full-lines %s
"""The mixture is used beside its norm, so the norm stays."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("block", "input", "block", (2, 1, 6), (6, 6, 1), "float32"),
    InputSpec("partial", "input", "partial", (2, 1, 6), (6, 6, 1), "float32"),
    InputSpec("query", "input", "query", (1, 6), (6, 1), "float32"),
    InputSpec("norm_weight", "input", "norm_weight", (6,), (1,), "float32"),
    InputSpec("out_norm_weight", "input", "out_norm_weight", (6,), (1,), "float32"),
)
OUTPUTS = ("normed", "mixed")
CONSTANTS = {}


@torch.no_grad()
def step(block, partial, query, norm_weight, out_norm_weight):
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
    return (normed, mixed)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(block, partial, query, norm_weight, out_norm_weight):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     squeeze = torch.ops.aten.squeeze.dim(query, 0)  # float32[6]
# CHECK-NEXT:     attention_residual = torch.ops.kimigraph.attention_residual.default([block, partial], squeeze, norm_weight, None, eps=1e-05, out_eps=1e-05); del squeeze  # float32[2, 1, 6]; replaces 5 nodes, stack to mixed
# CHECK-NEXT:     out_square = torch.ops.aten.square.default(attention_residual)  # float32[2, 1, 6]
# CHECK-NEXT:     out_mean = torch.ops.aten.mean.dim(out_square, [-1], True); del out_square  # float32[2, 1, 1]
# CHECK-NEXT:     out_shifted = torch.ops.aten.add.Tensor(out_mean, 1e-05); del out_mean  # float32[2, 1, 1]
# CHECK-NEXT:     out_root = torch.ops.aten.rsqrt.default(out_shifted); del out_shifted  # float32[2, 1, 1]
# CHECK-NEXT:     unit = torch.ops.aten.mul.Tensor(attention_residual, out_root); del out_root  # float32[2, 1, 6]
# CHECK-NEXT:     normed = torch.ops.aten.mul.Tensor(unit, out_norm_weight); del unit  # float32[2, 1, 6]
# CHECK-NEXT:     return (normed, attention_residual)
