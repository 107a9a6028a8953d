"""Mutations come back in place where that is right, as a copy where it is not; the numbers are eager's either way."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kimigraph.adapters.torch_export import FunctionalGraph, LiftedInput
from kimigraph.capture import capture_module
from kimigraph.capture.program import tensors_of
from kimigraph.capture.reinplace import reinplace
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram

ATEN = torch.ops.aten


def captured(module: nn.Module, *args: Any) -> CapturedProgram:
    return capture_module(module.eval(), args, {}, CompileConfig())


def targets(program: CapturedProgram) -> list[Any]:
    return [node.target for node in program.graph_module.graph.nodes if node.op == "call_function"]


def assert_like_eager(module: nn.Module, program: CapturedProgram, *args: Any, steps: int = 3) -> None:
    """Several steps on eager and on the captured graph: equal results, equal arguments, pointers kept."""
    ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
    pointers = [leaf.data_ptr() for leaf in pytree.tree_leaves(ours)]
    for _ in range(steps):
        want = [leaf for leaf in pytree.tree_leaves(module(*theirs)) if isinstance(leaf, Tensor)]
        got = program.graph_module(*tensors_of(program, ours, {}))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert [leaf.data_ptr() for leaf in pytree.tree_leaves(ours)] == pointers


class IndexCopy(nn.Module):
    def forward(self, cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        cache.index_copy_(1, place, rows)
        return cache.sum(-1)


class TwoWrites(nn.Module):
    def forward(self, cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        cache.index_copy_(1, place, rows)
        before = cache.sum(-1)
        cache.mul_(0.5)
        return before + cache.amax(-1)


class ReadAfterOverwrite(nn.Module):
    """The old sum is computed from a view made before the write."""

    def forward(self, cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        old = cache * 2
        cache.index_copy_(1, place, rows)
        return old - cache


class IntoSlice(nn.Module):
    def forward(self, cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        cache[:, 1 : 1 + rows.shape[1]].copy_(rows)
        return cache.cumsum(1)


class AddToSelectedRow(nn.Module):
    def forward(self, cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        cache.transpose(0, 1)[2].add_(1)
        cache.view(-1)[3:5].copy_(rows.flatten()[:2])
        return cache[:, 2] * 3


class WholeTurned(nn.Module):
    def forward(self, cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        cache.transpose(1, 2).mul_(2)
        return cache.view(-1)


class IndexPut(nn.Module):
    def forward(self, cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        cache[:, place] = rows
        return cache + 1


@pytest.mark.parametrize(
    ("module", "in_place"),
    [
        (IndexCopy(), [ATEN.index_copy_.default]),
        (TwoWrites(), [ATEN.index_copy_.default, ATEN.mul_.Tensor]),
        (ReadAfterOverwrite(), [ATEN.index_copy_.default]),
        (IntoSlice(), [ATEN.copy_.default]),
        (AddToSelectedRow(), [ATEN.add_.Tensor, ATEN.copy_.default]),
        (WholeTurned(), [ATEN.mul_.Tensor]),
        (IndexPut(), [ATEN.index_put_.default]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_writes_happen_where_the_model_writes(module: nn.Module, in_place: list[Any]) -> None:
    args = (torch.randn(2, 6, 4), torch.randn(2, 2, 4), torch.tensor([4, 1]))
    program = captured(module, *args)
    written = [target for target in targets(program) if str(target).split(".")[1].endswith("_")]
    assert written == in_place
    assert program.info["mutations"] == {"cache": "in place"}
    assert [spec.name for spec in program.inputs if spec.mutated] == ["cache"]
    assert_like_eager(module, program, *args)


class Swap(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
        return a - b


class Shift(nn.Module):
    """The source is another part of what is written."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a[1:].copy_(a[:-1] * 1)
        a[:2] = a[2:4]
        return a + b


class FunctionalState(nn.Module):
    """A recurrence written out of place and stored at the end, as delta-rule layers do."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        new = a * 0.5 + b
        out = new.sum(-1)
        a.copy_(new)
        return out


class ReturnsOldAndNew(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        old = a.clone()
        a.add_(b)
        return old, a, a.view(-1)[2:]


class SliceThenZero(nn.Module):
    """An out-of-place write whose result outlives an unrelated overwrite of its base."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        kept = torch.slice_scatter(a, b[:2], 0, 1, 3)
        a.zero_()
        return kept


class ReadThroughOtherType(nn.Module):
    """A reader of another dtype's view stands before the write."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        bits = a.view(torch.int32) * 2
        a[:, 2:3] = 2
        return bits


class TransposedIntoItself(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a.add_(a.t().clone())
        return a + b


class CastBack(nn.Module):
    """bfloat16 state, float32 arithmetic, an explicit rounding that equality depends on."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        low = a.to(torch.bfloat16)
        scaled = low / 3
        a.copy_(scaled)
        return (scaled == scaled.max()).sum().float() + b


@pytest.mark.parametrize(
    "module",
    [
        Swap(),
        Shift(),
        FunctionalState(),
        ReturnsOldAndNew(),
        SliceThenZero(),
        ReadThroughOtherType(),
        TransposedIntoItself(),
        CastBack(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_numbers_are_those_of_eager(module: nn.Module) -> None:
    args = (torch.randn(4, 4), torch.randn(4, 4))
    program = captured(module, *args)
    assert_like_eager(module, program, *args)


def functional_graph(late_reader: bool) -> tuple[FunctionalGraph, torch.fx.Graph]:
    """``new = index_copy(cache, ...)``, and a sum of the old cache before or after it."""
    graph = torch.fx.Graph()
    values = {"cache": torch.zeros(2, 6, 4), "rows": torch.ones(2, 2, 4), "place": torch.tensor([4, 1])}
    nodes = {name: graph.placeholder(name) for name in values}
    for name, node in nodes.items():
        node.meta["val"] = values[name]
    write = (ATEN.index_copy.default, (nodes["cache"], 1, nodes["place"], nodes["rows"]))
    read = (ATEN.sum.default, (nodes["cache"],))
    made = [graph.call_function(*call) for call in ((write, read) if late_reader else (read, write))]
    new, old_sum = made if late_reader else reversed(made)
    new.meta["val"], old_sum.meta["val"] = torch.zeros(2, 6, 4), torch.zeros(())
    graph.output((new, old_sum, new))
    inputs = tuple(LiftedInput(node, "argument", None, False, None) for node in nodes.values())
    return FunctionalGraph(graph, inputs, {"cache": new}, (old_sum, new), None, None), graph


@pytest.mark.parametrize("late_reader", [False, True])
def test_a_later_reader_of_the_old_value_forbids_the_early_write(late_reader: bool) -> None:
    functional, graph = functional_graph(late_reader)
    assert reinplace(functional) == {"cache": "copied" if late_reader else "in place"}
    step = torch.fx.GraphModule(nn.Module(), graph)
    cache = torch.full((2, 6, 4), 2.0)
    old_sum, new = step(cache, torch.ones(2, 2, 4), torch.tensor([4, 1]))
    assert old_sum.item() == 96
    assert cache.sum().item() == 80 and new.data_ptr() == cache.data_ptr()


def test_two_equal_results_stay_two_tensors() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x + 1

    program = captured(Twice(), torch.zeros(3))
    first, second = program.graph_module(torch.zeros(3))
    first.fill_(7)
    assert second.tolist() == [1, 1, 1]


@pytest.mark.parametrize("form", ["contiguous", "transposed", "offset", "every other"])
def test_strides_and_offsets_of_the_cache(form: str) -> None:
    """A cache handed over as a view is updated in place, and its strides are recorded."""
    forms = {
        "contiguous": lambda: torch.randn(2, 6, 4),
        "transposed": lambda: torch.randn(6, 2, 4).transpose(0, 1),
        "offset": lambda: torch.randn(1 + 48)[1:].view(2, 6, 4),
        "every other": lambda: torch.randn(2, 6, 8)[..., ::2],
    }
    cache, rows, place = forms[form](), torch.randn(2, 2, 4), torch.tensor([4, 1])
    for module in (IndexCopy(), AddToSelectedRow() if form in ("contiguous", "offset") else IntoSlice()):
        program = captured(module, cache, rows, place)
        spec = next(spec for spec in program.inputs if spec.name == "cache")
        assert spec.stride == cache.stride()
        assert_like_eager(module, program, cache, rows, place)


def test_result_is_the_right_part_of_the_input() -> None:
    """An unaligned input comes back as a view of itself, not of a copy."""

    class View(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1)

    big = torch.arange(8.0)
    program = captured(View(), big[1:5])
    (out,) = program.graph_module(big[1:5])
    assert out.data_ptr() == big[1:5].data_ptr() and out.tolist() == [1, 2, 3, 4]


def test_custom_operator_becomes_the_call_it_was() -> None:
    @torch.library.custom_op("kimigraph_test::accumulate", mutates_args=("state",))
    def accumulate(x: Tensor, state: Tensor) -> Tensor:
        state.add_(x)
        return state * 2

    @accumulate.register_fake
    def _(x: Tensor, state: Tensor) -> Tensor:
        return torch.empty_like(state)

    class Calls(nn.Module):
        def forward(self, x: Tensor, state: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            whole = torch.ops.kimigraph_test.accumulate(x, state)
            part = torch.ops.kimigraph_test.accumulate(x[0], other[1])
            local = torch.zeros_like(x)
            torch.ops.kimigraph_test.accumulate(x, local)
            return whole, part, local + state

    args = (torch.randn(2, 3), torch.randn(2, 3), torch.randn(4, 3))
    program = captured(Calls(), *args)
    calls = [
        node for node in program.graph_module.graph.nodes if node.target is torch.ops.kimigraph_test.accumulate.default
    ]
    assert len(calls) == 3 and not any("auto_functionalized" in str(target) for target in targets(program))
    assert calls[0].args[1].name == "state"
    assert program.info["mutations"]["state"] == "in place"
    assert_like_eager(Calls(), program, *args)


def test_buffer_of_the_module_is_updated_in_place() -> None:
    class Counter(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return x * self.count

    module = Counter()
    program = captured(module, torch.ones(2))
    assert module.count.item() == 0
    spec = next(spec for spec in program.inputs if spec.bound)
    assert (spec.kind, spec.source, spec.mutated) == ("buffer", "count", True)
    program.tensors[spec.name] = program.tensors[spec.name].clone()
    results = [program.graph_module(*tensors_of(program, (torch.ones(2),), {}))[0].tolist() for _ in range(2)]
    assert results == [[1, 1], [2, 2]]


class WrittenAndCopiedBack(nn.Module):
    """As functional code does it, and what was read from a file with states as results."""

    def forward(self, cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        new = torch.index_copy(cache, 1, place, rows)
        result = new.sum(-1)
        cache.copy_(new)
        return result


class CopiedBackAfterAReadOfTheOld(nn.Module):
    def forward(self, cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        new = torch.index_copy(cache, 1, place, rows)
        result = new.sum(-1) - cache.sum(-1)
        cache.copy_(new)
        return result


class DecayedAndCopiedBack(nn.Module):
    def forward(self, cache: Tensor, rows: Tensor, place: Tensor) -> Tensor:
        cache.copy_(cache * 0.5)
        return cache.sum(-1)


@pytest.mark.parametrize(
    ("module", "there", "gone"),
    [
        (WrittenAndCopiedBack(), ATEN.index_copy_.default, ATEN.copy_.default),
        (CopiedBackAfterAReadOfTheOld(), ATEN.copy_.default, ATEN.index_copy_.default),
        (DecayedAndCopiedBack(), ATEN.copy_.default, ATEN.mul_.Tensor),
    ],
)
def test_a_cache_that_is_copied_back_whole_is_written_in_place_where_it_was_made_by_partial_writes(
    module: nn.Module, there: Any, gone: Any
) -> None:
    given = (torch.randn(2, 6, 3), torch.randn(2, 2, 3), torch.tensor([1, 4]))
    program = captured(module, *given)
    assert there in targets(program) and gone not in targets(program)
    assert_like_eager(module, program, *given)
