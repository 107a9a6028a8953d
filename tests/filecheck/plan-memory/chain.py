# RUN: python -m kimigraph.tools.opt %s --passes plan-memory --remarks | filecheck --match-full-lines %s
"""Tensors share bytes as soon as all use of one has ended; a view, a write in place and a result that nothing takes count."""

import operator

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (InputSpec("x", "input", "model.x", (4, 8), (8, 1), "float32"),)
OUTPUTS = ("out_0",)
CONSTANTS = {}


@torch.no_grad()
def step(x):
    sin = torch.ops.aten.sin.default(x)  # float32[4, 8]
    view = torch.ops.aten.view.default(sin, [8, 4])  # float32[8, 4]
    exp = torch.ops.aten.exp.default(x)  # float32[4, 8]
    add_ = torch.ops.aten.add_.Tensor(exp, sin); del sin  # float32[4, 8]; writes exp
    sort = torch.ops.aten.sort.default(view); del view  # (float32[8, 4], int64[8, 4])
    getitem = operator.getitem(sort, 0); del sort  # float32[8, 4]
    view_1 = torch.ops.aten.view.default(getitem, [4, 8]); del getitem  # float32[4, 8]
    relu = torch.ops.aten.relu.default(add_); del add_, exp  # float32[4, 8]
    add = torch.ops.aten.add.Tensor(relu, view_1); del relu, view_1  # float32[4, 8]
    return (add,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     sin = torch.ops.aten.sin.default(x)  # float32[4, 8]; bytes 0 to 128 of the arena
# CHECK-NEXT:     view = torch.ops.aten.view.default(sin, [8, 4])  # float32[8, 4]
# CHECK-NEXT:     exp = torch.ops.aten.exp.default(x)  # float32[4, 8]; bytes 256 to 384 of the arena
# CHECK-NEXT:     add_ = torch.ops.aten.add_.Tensor(exp, sin); del sin, exp  # float32[4, 8]; writes exp
# CHECK-NEXT:     sort = torch.ops.aten.sort.default(view); del view  # (float32[8, 4], int64[8, 4])
# CHECK-NEXT:     getitem = sort[0]; del sort  # float32[8, 4]; bytes 512 to 640 of the arena
# CHECK-NEXT:     view_1 = torch.ops.aten.view.default(getitem, [4, 8]); del getitem  # float32[4, 8]
# CHECK-NEXT:     relu = torch.ops.aten.relu.default(add_); del add_  # float32[4, 8]; bytes 0 to 128 of the arena
# CHECK-NEXT:     add = torch.ops.aten.add.Tensor(relu, view_1); del relu, view_1  # float32[4, 8]
# CHECK-NEXT:     return (add,)
# CHECK: # note plan-memory at no node: 5 tensors of 1,280 bytes fit an arena of 1,024: 1.000 times what is in use at once (1,024); one stream, multiples of 256 bytes
# CHECK: # note plan-memory at add: add lies outside the arena: the step returns it
