# RUN: python -m kimigraph.tools.opt %s --passes raise-attention-residual --remarks | filecheck --match-full-lines %s
"""The values that are mixed are normalised, too: nothing changes."""

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
OUTPUTS = ("mixed",)
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
    unsqueeze_1 = torch.ops.aten.unsqueeze.default(root, -1)
    scaled = torch.ops.aten.mul.Tensor(stack, unsqueeze_1)
    weighted = torch.ops.aten.mul.Tensor(unsqueeze, scaled)
    mixed = torch.ops.aten.sum.dim_IntList(weighted, [0])
    return (mixed,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(block, partial, query, norm_weight, out_norm_weight):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     stack = torch.ops.aten.stack.default([block, partial])  # float32[2, 2, 1, 6]
# CHECK-NEXT:     squeeze = torch.ops.aten.squeeze.dim(query, 0)  # float32[6]
# CHECK-NEXT:     effective = torch.ops.aten.mul.Tensor(squeeze, norm_weight); del squeeze  # float32[6]
# CHECK-NEXT:     products = torch.ops.aten.mul.Tensor(stack, effective); del effective  # float32[2, 2, 1, 6]
# CHECK-NEXT:     dot = torch.ops.aten.sum.dim_IntList(products, [-1]); del products  # float32[2, 2, 1]
# CHECK-NEXT:     square = torch.ops.aten.square.default(stack)  # float32[2, 2, 1, 6]
# CHECK-NEXT:     mean = torch.ops.aten.mean.dim(square, [-1]); del square  # float32[2, 2, 1]
# CHECK-NEXT:     shifted = torch.ops.aten.add.Tensor(mean, 1e-05); del mean  # float32[2, 2, 1]
# CHECK-NEXT:     root = torch.ops.aten.rsqrt.default(shifted); del shifted  # float32[2, 2, 1]
# CHECK-NEXT:     logits = torch.ops.aten.mul.Tensor(dot, root); del dot  # float32[2, 2, 1]
# CHECK-NEXT:     softmax = torch.ops.aten.softmax.int(logits, 0); del logits  # float32[2, 2, 1]
# CHECK-NEXT:     unsqueeze = torch.ops.aten.unsqueeze.default(softmax, -1); del softmax  # float32[2, 2, 1, 1]
# CHECK-NEXT:     unsqueeze_1 = torch.ops.aten.unsqueeze.default(root, -1); del root  # float32[2, 2, 1, 1]
# CHECK-NEXT:     scaled = torch.ops.aten.mul.Tensor(stack, unsqueeze_1); del stack, unsqueeze_1  # float32[2, 2, 1, 6]
# CHECK-NEXT:     weighted = torch.ops.aten.mul.Tensor(unsqueeze, scaled); del unsqueeze, scaled  # float32[2, 2, 1, 6]
# CHECK-NEXT:     mixed = torch.ops.aten.sum.dim_IntList(weighted, [0]); del weighted  # float32[2, 1, 6]
# CHECK-NEXT:     return (mixed,)
# CHECK: # missed raise-attention-residual at scaled: softmax: the mixture: expected the same 'values' as before (stack), found aten.mul
