# RUN: python -m kimigraph.tools.opt %s --passes canonicalize | filecheck --match-full-lines %s
"""Equal pure nodes become one. Readings before and after a write, random numbers and outputs stay apart."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (2, 4), (4, 1), "float32"),
    InputSpec("state", "cache", "state", (2, 4), (4, 1), "float32", mutated=True),
)
OUTPUTS = ("total", "first_output", "second_output")
CONSTANTS = {}


@torch.no_grad()
def step(x, state):
    sine = torch.ops.aten.sin.default(x)
    sine_again = torch.ops.aten.sin.default(x)
    products = torch.ops.aten.mul.Tensor(sine, sine_again)
    before = torch.ops.aten.exp.default(state)
    before_again = torch.ops.aten.exp.default(state)
    write = torch.ops.aten.add_.Tensor(state, x)
    after = torch.ops.aten.exp.default(state)
    readings = torch.ops.aten.add.Tensor(before, before_again)
    difference = torch.ops.aten.sub.Tensor(readings, after)
    total = torch.ops.aten.add.Tensor(products, difference)
    first_output = torch.ops.aten.neg.default(x)
    second_output = torch.ops.aten.neg.default(x)
    return (total, first_output, second_output)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, state):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     sine = torch.ops.aten.sin.default(x)  # float32[2, 4]
# CHECK-NEXT:     products = torch.ops.aten.mul.Tensor(sine, sine); del sine  # float32[2, 4]
# CHECK-NEXT:     before = torch.ops.aten.exp.default(state)  # float32[2, 4]
# CHECK-NEXT:     torch.ops.aten.add_.Tensor(state, x)  # float32[2, 4]; writes state
# CHECK-NEXT:     after = torch.ops.aten.exp.default(state)  # float32[2, 4]
# CHECK-NEXT:     readings = torch.ops.aten.add.Tensor(before, before); del before  # float32[2, 4]
# CHECK-NEXT:     difference = torch.ops.aten.sub.Tensor(readings, after); del readings, after  # float32[2, 4]
# CHECK-NEXT:     total = torch.ops.aten.add.Tensor(products, difference); del products, difference  # float32[2, 4]
# CHECK-NEXT:     first_output = torch.ops.aten.neg.default(x)  # float32[2, 4]
# CHECK-NEXT:     second_output = torch.ops.aten.neg.default(x)  # float32[2, 4]
# CHECK-NEXT:     return (total, first_output, second_output)
