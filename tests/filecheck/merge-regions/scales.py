# RUN: python -m kimigraph.tools.opt %s --passes merge-regions | filecheck --match-full-lines %s
"""Operations that do not wait for one another become one region of regions."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "model.x", (2, 1, 16), (16, 16, 1), "float32"),
    InputSpec("y", "input", "model.y", (2, 8), (8, 1), "float32"),
)
OUTPUTS = ("out_0", "out_1")
CONSTANTS = {}


@torch.no_grad()
def step(x, y):
    sigmoid = torch.ops.aten.sigmoid.default(x)  # float32[2, 1, 16]
    mul = torch.ops.aten.mul.Tensor(y, 0.5)  # float32[2, 8]
    return (sigmoid, mul)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, y):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     horizontal_0 = run_horizontal_0(x, y)  # (float32[2, 1, 16], float32[2, 8]); replaces 2 nodes, pointwise_0 to pointwise_1
# CHECK-NEXT:     getitem = horizontal_0[0]  # float32[2, 1, 16]; replaces 1 nodes, sigmoid to sigmoid
# CHECK-NEXT:     getitem_1 = horizontal_0[1]; del horizontal_0  # float32[2, 8]; replaces 1 nodes, mul to mul
# CHECK-NEXT:     return (getitem, getitem_1)
