"""``canonicalize`` on random programs with writes, aliases and repeated nodes: every bit of every result stays."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.canonicalize import Canonicalize

SHAPE = (4, 4)
PURE: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a + b,
    lambda a, b: a * b.sin(),
    lambda a, b: a * 0.0,
    lambda a, b: a * -0.0,
    lambda a, b: a + 1,
    lambda a, b: a.clone(),
    lambda a, b: a.t().contiguous(),
    lambda a, b: torch.zeros(SHAPE),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: a.to(torch.bfloat16).to(torch.float32),
)
VIEWS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a.t(),
    lambda a, b: a.view(2, 8).view(SHAPE) if a.is_contiguous() else a.t(),
    lambda a, b: a.transpose(0, 1).transpose(0, 1),
    lambda a, b: a[0:4],
    lambda a, b: a.unsqueeze(0).squeeze(0),
    lambda a, b: torch.ops.aten.alias.default(a),
)
WRITES: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a.add_(1),
    lambda a, b: a.copy_(b.clone()),
    lambda a, b: a.mul_(b.cos()),
    lambda a, b: a[1].fill_(2.0).expand(SHAPE).clone(),
    lambda a, b: a[:, 2:].zero_().sum() + b,
)


@dataclass(frozen=True)
class Step:
    """One operation on two earlier values, by number."""

    operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = field(repr=False)
    name: str
    left: int
    right: int


@st.composite
def steps(draw: st.DrawFn) -> Step:
    kind, table = draw(st.sampled_from([("pure", PURE), ("pure", PURE), ("view", VIEWS), ("write", WRITES)]))
    number = draw(st.integers(0, len(table) - 1))
    return Step(table[number], f"{kind}-{number}", draw(st.integers(0, 4)), draw(st.integers(0, 4)))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    program_steps=st.lists(steps(), min_size=1, max_size=7),
    outputs=st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_random_programs_keep_every_bit(
    program_steps: list[Step], outputs: list[int], trace: Any, run: Any, context: PassContext
) -> None:
    def function(x: torch.Tensor, state: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, state, other]
        for step in program_steps * 2:  # twice the same on inputs or recent values, so that repetitions arise
            left, right = (values[i] if i < 3 else values[2 - i] for i in (step.left, step.right))
            values.append(step.operation(left, right))
        return tuple(values[-1 - index % len(values)] + 0.5 for index in outputs)

    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(SHAPE, generator=generator) for _ in range(3)]
    program = trace(function, *tensors)
    expected = run(program, *tensors)
    (record,) = run_pipeline(program, Pipeline((Canonicalize(),)), context)
    found = run(program, *tensors)
    for old, new in zip([*expected[0], *expected[1]], [*found[0], *found[1]], strict=True):
        assert torch.equal(old.contiguous().view(torch.int32), new.contiguous().view(torch.int32))
    eager = [tensor.clone() for tensor in tensors]
    results = function(*eager)
    for old, new in zip([*results, *eager], [*found[0], *found[1]], strict=True):
        torch.testing.assert_close(old, new, equal_nan=True)
    assert record.nodes_after <= record.nodes_before
