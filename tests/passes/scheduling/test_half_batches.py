"""``--half-batches``: two halves of a batch as one program, when they are taken, and what cannot be halved."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kimigraph.capture import capture_module
from kimigraph.capture.halves import half_of_call
from kimigraph.halving import Halving
from kimigraph.ir.branches import branch_of
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.schedule import stream_of
from kimigraph.passes import default_pipeline, run_pipeline
from kimigraph.passes.manager import PassRecord
from kimigraph.session import pass_context

CONFIG = CompileConfig(target="cuda:sm_90")
WIDTH = 176


class Chain(nn.Module):
    """``x`` [B, D] times ``count`` weights, then times each row's own matrices, which ``writes`` makes states."""

    def __init__(self, count: int, writes: bool = False) -> None:
        super().__init__()
        self.writes = writes
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(count))

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        for weight in self.weights:
            x = (x @ weight).tanh()
        for state in cache.values():
            x = (state @ x[:, :, None])[:, :, 0].tanh()
            if self.writes:
                state[:, 0].copy_(x)
        return x


def call_of(batch: int, states: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    cache = {f"state.{number}": torch.randn(batch, WIDTH, WIDTH) / WIDTH**0.5 for number in range(states)}
    return torch.randn(batch, WIDTH), cache


def compiled(
    module: nn.Module, args: tuple[Any, ...], config: CompileConfig
) -> tuple[CapturedProgram, list[PassRecord]]:
    captured = capture_module(module, args, {}, config)
    pipeline = default_pipeline(config)
    halving = Halving(config, pipeline, partial(half_of_call, module, args, {}, config, None))

    def run(program: CapturedProgram, watched: bool) -> list[PassRecord]:
        return run_pipeline(program, pipeline, pass_context(config))

    return halving.run(captured, run)


def planned(records: list[PassRecord]) -> float:
    """Microseconds as placed."""
    [record] = [record for record in records if record.name == "assign-streams"]
    return record.result.statistics["planned_ns"] / 1e3


def told(records: list[PassRecord]) -> list[str]:
    return [
        remark.message for record in records for remark in record.result.remarks if record.name == "interleave-halves"
    ]


def computed(program: CapturedProgram, args: tuple[Any, ...]) -> list[Tensor]:
    x, cache = args
    given = iter([x.clone(), *(value.clone() for value in cache.values())])
    tensors = [program.tensors[spec.name] if spec.bound else next(given) for spec in program.inputs]
    program.graph_module.recompile()
    with torch.no_grad():
        return [*program.graph_module(*tensors), *tensors]


def test_two_halves_compute_what_the_batch_does_and_lie_beside_one_another() -> None:
    module, args = Chain(2, writes=True), call_of(8, 3)
    whole, _ = compiled(module, args, replace(CONFIG, half_batches="off"))
    halves, records = compiled(module, args, replace(CONFIG, half_batches="on"))
    assert told(records)[0].startswith("two half-batches of 4 sequences")
    assert [spec.shape for spec in halves.inputs] == [spec.shape for spec in whole.inputs]
    for value, want in zip(computed(halves, args), computed(whole, args), strict=True):
        torch.testing.assert_close(value, want)
    streams = {
        name: {stream_of(node) for node in halves.graph_module.graph.nodes if branch_of(node) == name}
        for name in ("half 0", "half 1")
    }
    assert streams["half 0"] and streams["half 1"] and len(streams["half 0"] | streams["half 1"]) >= 2
    assert [record.name for record in records][-1] == "verify-schedule"


def test_halves_are_taken_where_they_are_planned_shorter() -> None:
    """Each row brings its own matrices, and there is no weight to read twice."""
    module, args = Chain(0), call_of(64, 6)
    whole, serial = compiled(module, args, replace(CONFIG, half_batches="off"))
    chosen, records = compiled(module, args, CONFIG)
    length, before = planned(records), planned(serial)
    assert chosen.info["halves"] == 2 and "halves" not in whole.info and length < 0.95 * before
    assert f"planned as two half-batches {length:.1f} us, as it is {before:.1f} us" in told(records)


def test_halves_are_not_taken_where_both_would_read_the_weights() -> None:
    chosen, records = compiled(Chain(6), call_of(8, 0), CONFIG)
    assert "halves" not in chosen.info and not told(records)
    notes = [remark.message for record in records for remark in record.result.remarks if remark.kind == "note"]
    assert not any(branch_of(node) for node in chosen.graph_module.graph.nodes) and notes


def test_one_stream_has_no_halves_unless_asked_for() -> None:
    module, args = Chain(0), call_of(64, 6)
    chosen, _ = compiled(module, args, replace(CONFIG, streams=1))
    asked, _ = compiled(module, args, replace(CONFIG, streams=1, half_batches="on"))
    assert "halves" not in chosen.info and asked.info["halves"] == 2
    assert not any(stream_of(node) for node in asked.graph_module.graph.nodes)


@pytest.mark.parametrize(
    ("batch", "changes", "reason"),
    [
        (3, {}, "inputs and results have 3 rows"),
        (1, {}, "inputs and results have 1 rows"),
        (4, {"phase": "prefill"}, "half-batches are for decode"),
        (4, {"cache_layout": "paged"}, "over caches as the model has them"),
        (4, {"check_numerics": True}, "--check-numerics compares passes on one form"),
        (4, {"disabled_passes": ("interleave-halves",)}, "interleave-halves is not in the pipeline"),
    ],
)
def test_what_cannot_be_halved_is_refused_with_the_reason(batch: int, changes: dict[str, Any], reason: str) -> None:
    module, args = Chain(1, writes=True), call_of(batch, 1)
    with pytest.raises(UsageError, match=f"--half-batches on: .*{reason}"):
        compiled(module, args, replace(CONFIG, half_batches="on", **changes))


def test_an_updated_buffer_of_the_model_is_refused() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.steps.add_(1)
            return x * 2

    with pytest.raises(UsageError, match="the step updates a buffer of the model"):
        compiled(Counting(), (torch.randn(4, 3),), replace(CONFIG, half_batches="on"))


class Table(nn.Module):
    """Adds one table to every row; the table has as many rows as the batch, or one."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return x + table.sum()


@pytest.mark.parametrize("make", [Table, lambda: Rows()])
def test_a_model_that_makes_something_else_of_the_rows_is_refused(make: Callable[[], nn.Module]) -> None:
    module, x = make(), torch.randn(4, 16)
    args = (x, torch.randn(1, 16)) if isinstance(module, Table) else (x,)
    with pytest.raises(UsageError, match="rows, not one even batch"):
        compiled(module, args, replace(CONFIG, half_batches="on"))


class Rows(nn.Module):
    """Returns the sum over the batch: no result of a half."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0)


class Narrow(nn.Module):
    """Adds to a cache of few numbers a row."""

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1.0)
        return x * cache.sum(1)


def test_a_second_half_may_begin_anywhere() -> None:
    """At 4 and 12 bytes here: code generation is told where a view begins."""
    halves, _ = compiled(Narrow(), (torch.randn(2), torch.randn(2, 3)), replace(CONFIG, half_batches="on"))
    x, cache = torch.randn(2), torch.randn(2, 3)
    want = x * (cache + 1).sum(1)
    halves.graph_module.recompile()
    torch.testing.assert_close(halves.graph_module(x, cache)[0], want)
