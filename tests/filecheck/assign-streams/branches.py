# RUN: python -m kimigraph.tools.opt %s --passes assign-streams --remarks | filecheck --match-full-lines %s
"""A branch of its own goes to a second stream and is joined where its result is used; the cache is written there."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "model.x", (4, 8), (8, 1), "float32"),
    InputSpec("weight", "weight", "model.weight", (8, 8), (8, 1), "float32"),
    InputSpec("cache", "cache", "model.cache", (4, 8), (8, 1), "float32", mutated=True),
)
OUTPUTS = ("out_0",)
CONSTANTS = {}


@torch.no_grad()
def step(x, weight, cache):
    mm = torch.ops.aten.mm.default(x, weight)  # float32[4, 8]
    sin = torch.ops.aten.sin.default(mm)  # float32[4, 8]
    copy_ = torch.ops.aten.copy_.default(cache, sin); del copy_  # float32[4, 8]; writes cache
    sum_1 = torch.ops.aten.sum.dim_IntList(cache, [0]); del sin  # float32[8]
    exp = torch.ops.aten.exp.default(mm)  # float32[4, 8]
    mm_1 = torch.ops.aten.mm.default(exp, weight); del exp  # float32[4, 8]
    relu = torch.ops.aten.relu.default(mm_1); del mm, mm_1  # float32[4, 8]
    add = torch.ops.aten.add.Tensor(relu, sum_1); del relu, sum_1  # float32[4, 8]
    return (add,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, weight, cache):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     mm = torch.ops.aten.mm.default(x, weight)  # float32[4, 8]
# CHECK-NEXT:     exp = torch.ops.aten.exp.default(mm)  # float32[4, 8]
# CHECK-NEXT:     mm_1 = torch.ops.aten.mm.default(exp, weight); del exp  # float32[4, 8]
# CHECK-NEXT:     relu = torch.ops.aten.relu.default(mm_1); del mm_1  # float32[4, 8]
# CHECK-NEXT:     sin = torch.ops.aten.sin.default(mm); del mm  # float32[4, 8]; stream 1; waits for mm
# CHECK-NEXT:     torch.ops.aten.copy_.default(cache, sin); del sin  # float32[4, 8]; writes cache; stream 1
# CHECK-NEXT:     sum_1 = torch.ops.aten.sum.dim_IntList(cache, [0])  # float32[8]; stream 1
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(relu, sum_1); del relu, sum_1  # float32[4, 8]; waits for sum_1
# CHECK-NEXT:     return (add,)
# CHECK: # passed assign-streams at sin: sin, copy_, sum_1 run beside exp, mm_1, relu: 6.87 us on one stream, 3.93 us forked, events included
