# RUN: python -m kimigraph.tools.opt %s --passes canonicalize | filecheck --match-full-lines %s
"""An assertion that the recorded shapes and types prove goes, and with it what only it read."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (2, 4), (4, 1), "float32"),
    InputSpec("numbers", "input", "numbers", (3,), (1,), "int64", value_range=(0, 5)),
)
OUTPUTS = ("out",)
CONSTANTS = {}


@torch.no_grad()
def step(x, numbers):
    torch.ops.aten._assert_tensor_metadata.default(x, None, None, torch.float32)
    wide = torch.ops.aten._to_copy.default(x, dtype=torch.float64)
    torch.ops.aten._assert_tensor_metadata.default(wide, None, None, torch.float64)
    holds = torch.ops.aten.ge.Scalar(numbers, 0)
    all_hold = torch.ops.aten.all.default(holds)
    torch.ops.aten._assert_async.msg(all_hold, "may fail: it stays")
    out = torch.ops.aten.sin.default(x)
    return (out,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, numbers):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     holds = torch.ops.aten.ge.Scalar(numbers, 0)  # bool[3]
# CHECK-NEXT:     all_hold = torch.ops.aten.all.default(holds); del holds  # bool[]
# CHECK-NEXT:     torch.ops.aten._assert_async.msg(all_hold, 'may fail: it stays'); del all_hold  # without a value
# CHECK-NEXT:     out = torch.ops.aten.sin.default(x)  # float32[2, 4]
# CHECK-NEXT:     return (out,)
