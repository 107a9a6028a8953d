# RUN: python -m kimigraph.tools.opt %s --passes canonicalize | filecheck --match-full-lines %s
"""Pure nodes that nothing uses go, chains of them from the end; writes stay, through views too."""

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import main

INPUTS = (
    InputSpec("x", "input", "x", (2, 4), (4, 1), "float32"),
    InputSpec("state", "cache", "state", (2, 4), (4, 1), "float32", mutated=True),
)
OUTPUTS = ("out",)
CONSTANTS = {}


@torch.no_grad()
def step(x, state):
    unused = torch.ops.aten.sin.default(x)
    unused_too = torch.ops.aten.exp.default(unused)
    row = torch.ops.aten.select.int(state, 0, 1)
    first = torch.ops.aten.select.int(x, 0, 0)
    write = torch.ops.aten.copy_.default(row, first)
    own = torch.ops.aten.clone.default(x)
    filled = torch.ops.aten.fill_.Scalar(own, 2.0)
    out = torch.ops.aten.mul.Tensor(own, x)
    return (out,)


if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)

# CHECK-LABEL: def step(x, state):
# CHECK-NEXT:     """One step; caches change in place."""
# CHECK-NEXT:     row = torch.ops.aten.select.int(state, 0, 1)  # float32[4]
# CHECK-NEXT:     first = torch.ops.aten.select.int(x, 0, 0)  # float32[4]
# CHECK-NEXT:     torch.ops.aten.copy_.default(row, first); del row, first  # float32[4]; writes state
# CHECK-NEXT:     own = torch.ops.aten.clone.default(x)  # float32[2, 4]
# CHECK-NEXT:     torch.ops.aten.fill_.Scalar(own, 2.0)  # float32[2, 4]; writes own
# CHECK-NEXT:     out = torch.ops.aten.mul.Tensor(own, x); del own  # float32[2, 4]
# CHECK-NEXT:     return (out,)
