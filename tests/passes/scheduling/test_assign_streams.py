"""Schedules: legal, as small as they can be, the same results, and a reason for what is not forked."""

from random import Random
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import INPUTS, KINDS, SIZE, Built, Steps, build, is_safe, reached, steps_of
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from kimigraph.capture import capture_module
from kimigraph.cli.compile import configurations, parameters
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.dependences import work_dependences
from kimigraph.ir.device import target_device
from kimigraph.ir.fake import infer
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.remarks import PassResult
from kimigraph.ir.schedule import HappensBefore, stream_of, summarize, waits_of
from kimigraph.passes.assign_streams import AssignStreams
from kimigraph.passes.base import PassContext
from kimigraph.passes.scheduling.halves import Halves, half_batches
from kimigraph.passes.verify_schedule import VerifySchedule

CONTEXT = PassContext(CompileConfig(target="cuda"))
CHAIN: Steps = [("add", 0, 1), ("add", 3, 3), ("add", 4, 4), ("add", 5, 5)]
DIAMOND: Steps = [("add", 0, 1), ("add", 3, 3), ("add", 4, 4), ("add", 3, 3), ("add", 6, 6), ("add", 5, 7)]


def assign(built: Built, context: PassContext = CONTEXT, **options: Any) -> PassResult:
    return AssignStreams(**options).apply(built.program, context)


def computed(built: Built) -> list[torch.Tensor]:
    """Outputs and inputs afterwards of one step."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.rand(SIZE, generator=generator) for _ in range(INPUTS)]
    built.program.graph_module.recompile()
    return [tensor.clone() for tensor in (*built.program.graph_module(*tensors), *tensors)]


@settings(max_examples=200, deadline=None)
@given(steps_of, st.sampled_from([2, 3, 4]))
def test_forced_schedules_are_safe_and_no_wait_is_implied(steps: Steps, streams: int) -> None:
    built = build(steps)
    assign(built, streams=streams, force=True)
    built.graph.lint()
    assert is_safe(built)
    assert {stream_of(node) for node in built.work} <= set(range(streams))
    order = reached(built)
    for node in built.work:
        waits = node.meta.get("waits", ())
        for name in waits:
            node.meta["waits"] = tuple(other for other in waits if other != name)
            assert reached(built) != order, (node, name)
        if waits:
            node.meta["waits"] = waits


@settings(max_examples=100, deadline=None)
@given(steps_of, st.booleans())
def test_two_halves_are_placed_as_one_part_and_are_safe(steps: Steps, force: bool) -> None:
    """Recorded as they begin, whatever the program is: no race."""
    built = build(steps)
    built.program.info["halves"] = 2
    assign(built, force=force)
    built.graph.lint()
    assert is_safe(built)
    VerifySchedule().apply(built.program, CONTEXT)


@settings(max_examples=100, deadline=None)
@given(steps_of)
def test_the_recorded_order_computes_the_same_bits(steps: Steps) -> None:
    steps = [step for step in steps if step[0] not in ("random", "sort")]  # no numbers to compare, or integers
    wanted, built = computed(build(steps)), build(steps)
    assign(built, force=True)
    assert all(map(torch.equal, computed(built), wanted))


@settings(max_examples=50, deadline=None)
@given(steps_of)
def test_what_happens_before_is_what_brute_force_finds(steps: Steps) -> None:
    built = build(steps)
    assign(built, force=True)
    order, before = HappensBefore(built.graph), reached(built)
    assert all(order.ordered(a, b) == (a in before[b]) for a in built.work for b in built.work if a is not b)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_wide_programs_use_all_streams(seed: int) -> None:
    steps: Steps = [("add", seed % 3 + number, number * seed) for number in range(3, 60)]
    built = build([("add", number % 3, 1) for number in range(8)] + steps)
    result = assign(built, force=True)
    assert result.modified and result.statistics["events"] > 0
    assert {stream_of(node) for node in built.work} == {0, 1, 2}
    assert is_safe(built)
    VerifySchedule().apply(built.program, CONTEXT)


def test_a_diamond_forks_once_and_joins_once() -> None:
    built = build(DIAMOND, outputs=1)
    result = assign(built)
    assert [remark.kind for remark in result.remarks] == ["passed"]
    planned = result.statistics.pop("planned_ns")
    assert result.statistics == {"forks": 1, "aside": 2, "events": 2} and 5000 < planned < 5200
    # The main branch is recorded first, and what it forks from and joins is all that is waited for.
    assert [stream_of(node) for node in built.graph.nodes if node in built.work] == [0, 0, 0, 1, 1, 0]
    assert [waits_of(node) for node in built.graph.nodes if waits_of(node)] == [("add",), ("add_4",)]
    figures = summarize(built.graph, target_device("cuda"))
    assert (figures.count, figures.events) == (2, 2)
    assert figures.critical_path_us == pytest.approx(figures.serial_us * 4 / 6, rel=1e-3)


def told(built: Built, context: PassContext = CONTEXT, **options: Any) -> str:
    """What the pass says of a program that it leaves on one stream."""
    result = assign(built, context, **options)
    assert not result.modified and not any(stream_of(node) for node in built.graph.nodes)
    return result.remarks[-1].message


def test_what_stays_on_one_stream_says_why() -> None:
    assert told(build(CHAIN, outputs=1)).startswith("one stream: the program is a chain")
    assert told(build(CHAIN, outputs=1), force=True).startswith("one stream: the program is a chain")
    assert told(build(DIAMOND), streams=1) == "one stream: no more were asked for (--streams)"
    cpu = PassContext(CompileConfig(target="cpu"))
    assert told(build(DIAMOND), cpu) == "one stream: one CPU core runs one kernel at a time"
    none = told(build(DIAMOND), least_gain_us=50.0)
    assert none == "one stream: none of 1 places with independent nodes gains enough from a fork"
    large = build(DIAMOND)
    large.program.info.update(batch=64, tokens=8)
    assert told(large).startswith("one stream: kernels for 512 tokens fill the device")
    assert assign(large, tokens=512).modified


class TwoProducts(torch.nn.Module):
    """Two branches that only the sum joins."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.a(x).relu() + self.b(y).relu()


@pytest.mark.parametrize(("rows", "filled"), [((2, 4), False), ((8, 8), True)])
def test_a_module_called_from_python_counts_its_rows(rows: tuple[int, int], filled: bool) -> None:
    """No shape key is stated with such a capture: eight rows may fork, 64 fill the device."""
    program = capture_module(TwoProducts(), (torch.randn(*rows, 16), torch.randn(*rows, 16)), {}, CONTEXT.config)
    remark = AssignStreams(least_gain_us=50.0).apply(program, CONTEXT).remarks[-1].message
    assert remark.startswith("one stream: kernels for 64 tokens fill the device") is filled


def test_options_of_the_command_line_arrive() -> None:
    given = {item.name: item.default for item in parameters()}
    [config] = configurations(given | {"target": "cuda", "streams": 1})
    assert not assign(build(DIAMOND), PassContext(config)).modified
    [config] = configurations(given | {"target": "cpu", "force_streams": True})
    built = build(DIAMOND)
    assert assign(built, PassContext(config)).modified and is_safe(built)


def test_five_thousand_nodes_take_a_second() -> None:
    """Five, as the machine may be busy: what is not near linear takes minutes."""
    draw = Random(0)
    built = build([(draw.choice(KINDS), draw.randrange(40), draw.randrange(40)) for _ in range(5000)], window=40)
    start = perf_counter()
    assert assign(built, force=True).modified
    assert VerifySchedule().apply(built.program, CONTEXT).statistics["nodes"] == len(built.work) > 4000
    assert perf_counter() - start < 5


def test_a_second_run_starts_anew() -> None:
    built = build(DIAMOND)
    assign(built, force=True)
    first = str([(node.name, stream_of(node), waits_of(node)) for node in built.graph.nodes])
    assign(built, force=True)
    assert str([(node.name, stream_of(node), waits_of(node)) for node in built.graph.nodes]) == first
    assign(built, streams=1)
    assert not any(stream_of(node) or waits_of(node) for node in built.graph.nodes)


def test_two_branches_on_views_of_one_buffer_are_one_stream_and_on_two_buffers_two() -> None:
    one = build([("add", 0, 1), ("view", 3, 0), ("add_", 4, 0), ("add_", 3, 1), ("add", 5, 6)], outputs=1)
    both: Steps = [("add", 0, 1), ("add", 0, 2), ("view", 3, 0), ("add_", 5, 0), ("add_", 4, 1), ("add", 6, 7)]
    two = build(both, outputs=1)
    assign(one, force=True)
    assert len({stream_of(node) for node in one.work}) == 1
    assign(two, force=True)
    assert len({stream_of(node) for node in two.work}) == 2 and is_safe(two)


def test_collectives_of_two_branches_are_on_one_stream_in_the_order_of_the_program() -> None:
    """What two ranks could meet in another order would wait for ever."""
    gather, wait = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default
    graph = Graph()
    with FakeTensorMode():
        value = torch.empty(4)
    x = graph.placeholder("x")
    x.meta["val"] = value
    branches = []
    for branch in range(2):
        node = graph.call_function(torch.ops.aten.mul.Tensor, (x, branch + 2.0))
        for target, *args in (
            *((gather, "sum", "0"), (wait,)),
            *((torch.ops.aten.sin.default,), (torch.ops.aten.cos.default,)),
        ):
            node.meta["val"] = value
            node = graph.call_function(target, (node, *args))
        node.meta["val"] = value
        branches.append(node)
    graph.output(tuple(branches))
    program = CapturedProgram(
        GraphModule(torch.nn.Module(), graph), (InputSpec("x", "input", "x", (4,), (1,), "float32"),), ()
    )
    assert AssignStreams(force=True, whole=True).apply(program, CONTEXT).modified
    assert {stream_of(node) for node in graph.nodes} == {0, 1}
    reduced = [node for node in graph.nodes if node.target is gather]
    assert [stream_of(node) for node in reduced] == [0, 0] and [n.args[0].args[1] for n in reduced] == [2.0, 3.0]
    VerifySchedule().apply(program, CONTEXT)


def test_kernels_that_keep_counters_never_run_at_once() -> None:
    from kimigraph.ir.dependences import is_one_at_a_time, work_dependences

    def attend(graph: Graph, number: int) -> Any:
        queries, rows = (graph.placeholder(f"{name}_{number}") for name in ("queries", "rows"))
        queries.meta["val"], rows.meta["val"] = torch.empty(1, 1, 8, device="meta"), torch.empty(1, 8, device="meta")
        node = graph.call_function(torch.ops.kimigraph.latent_attention.default, (queries, rows))
        node.meta["val"] = torch.empty(1, 1, 8, device="meta")
        return node

    graph = Graph()
    first, second = attend(graph, 0), attend(graph, 1)
    graph.output((first, second))
    assert is_one_at_a_time(first)
    assert [(item.first, item.kind) for item in work_dependences(graph)[second]] == [(first, "one at a time")]


def test_half_batches_are_priced_by_what_both_halves_read() -> None:
    """Two products of one weight each: the second read of the weight against the launches that a half hides."""

    def priced(rows: int, columns: int) -> Halves:
        graph = Graph()
        with FakeTensorMode() as mode:
            x = graph.placeholder("x")
            x.meta["val"] = mode.from_tensor(torch.empty(rows, columns, device="meta"))
            specs = {"x": InputSpec("x", "input", "x", (rows, columns), (columns, 1), "float32")}
            for name in ("first", "second"):
                weight = graph.placeholder(name)
                weight.meta["val"] = mode.from_tensor(torch.empty(columns, columns, device="meta"))
                specs[name] = InputSpec(name, "weight", name, (columns, columns), (columns, 1), "float32")
        left = x
        for name in ("first", "second"):
            weight = next(node for node in graph.nodes if node.name == name)
            left = graph.call_function(torch.ops.aten.mm.default, (left, weight))
            infer(left)
        graph.output((left,))
        return half_batches(work_dependences(graph), specs, CONTEXT.device)

    small, large = priced(2**16, 64), priced(8, 4096)
    assert small.weights == 2 * 64 * 64 * 4 and small.may_pay
    assert large.weights == 2 * 4096 * 4096 * 4 and not large.may_pay
    assert large.halves > large.whole and "as much as hidden launches save, or more" in large.describe(CONTEXT.device)


def test_a_batch_of_several_gets_the_price_of_its_halves() -> None:
    built = build(DIAMOND)
    assert not any("half-batches" in remark.message for remark in assign(built, force=True).remarks)
    built.program.info["batch"] = 8
    assert any("half-batches take at least" in remark.message for remark in assign(built, force=True).remarks)
    built.program.info["tokens"] = 64
    assert any("half-batches take at least" in remark.message for remark in assign(built).remarks)
