"""The checker against brute force: what is safe passes, what is not is refused, whatever was changed in it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import NBYTES, Built, Steps, build, is_safe, set_plan, steps_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError
from kimigraph.ir.launch_memory import Allocation
from kimigraph.ir.lifetimes import Lifetimes, NewTensor
from kimigraph.passes.assign_streams import AssignStreams
from kimigraph.passes.base import PassContext
from kimigraph.passes.manager import run_pipeline
from kimigraph.passes.pipeline import Pipeline
from kimigraph.passes.plan_memory import PlanMemory
from kimigraph.passes.verify_schedule import ScheduleError, VerifySchedule

CONTEXT = PassContext(CompileConfig(target="cuda"))
WIDE: Steps = [
    *[("add", number % 3, number % 2) for number in range(6)],
    *[(kind, 3 + number, 4 + number) for number in range(6) for kind in ("view", "add_", "add", "sort", "add")],
]


def accepted(built: Built) -> bool:
    try:
        VerifySchedule().apply(built.program, CONTEXT)
    except ScheduleError:
        return False
    return True


def forked(steps: Steps, streams: int = 3) -> Built:
    built = build(steps)
    AssignStreams(streams=streams, force=True).apply(built.program, CONTEXT)
    return built


def plan_of(built: Built) -> dict[str, tuple[int, int]]:
    """The buffers that the nodes carry, by storage."""
    named = {storage: nodes[0] for storage, nodes in built.named.items()}
    return {storage: node.meta["buffer"] for storage, node in named.items() if "buffer" in node.meta}


def without_each_wait(built: Built) -> Iterator[tuple[Node, str]]:
    """Each wait deleted, one at a time; joins are waits too."""
    for node in list(built.graph.nodes):
        waits = node.meta.get("waits", ())
        for name in waits:
            node.meta["waits"] = tuple(other for other in waits if other != name)
            yield node, name
            node.meta["waits"] = waits


@settings(max_examples=200, deadline=None)
@given(steps_of, st.sampled_from([2, 3, 5]))
def test_every_wait_that_is_deleted_is_missed_exactly_when_it_was_needed(steps: Steps, streams: int) -> None:
    built = forked(steps, streams)
    assert is_safe(built) and accepted(built)
    for node, name in without_each_wait(built):
        assert accepted(built) == is_safe(built), (node, name)
    for node in built.work:
        stream = node.meta.get("stream", 0)
        node.meta["stream"] = (stream + 1) % streams
        assert accepted(built) == is_safe(built), node
        node.meta["stream"] = stream


@settings(max_examples=200, deadline=None)
@given(steps_of, st.data())
def test_random_plans_pass_exactly_when_no_byte_is_taken_too_early(steps: Steps, data: st.DataObject) -> None:
    built = forked(steps)
    storages = [name for name in built.named if data.draw(st.integers(0, 3))]
    offsets = [data.draw(st.integers(0, 12)) * (NBYTES // 2) for _ in storages]
    plan = {name: (offset, NBYTES) for name, offset in zip(storages, offsets, strict=True)}
    set_plan(built, plan)
    assert accepted(built) == is_safe(built, plan)


@settings(max_examples=100, deadline=None)
@given(steps_of)
def test_planned_memory_passes_and_swapped_buffers_pass_exactly_when_they_are_safe(steps: Steps) -> None:
    built = forked(steps)
    figures = PlanMemory().apply(built.program, CONTEXT).statistics
    assert figures["lower bound"] <= figures["arena bytes"] <= 1.1 * figures["lower bound"]
    plan = plan_of(built)
    assert is_safe(built, plan) and accepted(built)
    clear_call_buffers(built)
    for one in plan:
        for other in plan:
            if one < other and plan[one] != plan[other]:
                swapped = plan | {one: plan[other], other: plan[one]}
                set_plan(built, swapped)
                assert accepted(built) == is_safe(built, swapped), (one, other)
    set_plan(built, plan)
    for node, name in without_each_wait(built):
        assert accepted(built) == is_safe(built, plan), (node, name)


@settings(max_examples=100, deadline=None)
@given(steps_of, st.sampled_from([1, 2, 3]), st.data())
def test_scratch_is_planned_beside_all_that_its_call_touches(steps: Steps, streams: int, data: st.DataObject) -> None:
    """By brute force over pairs of the plan's own tensors, and by the checker, which shares no code with the plan."""
    built = forked(steps, streams)
    for node in built.work:
        pieces = data.draw(st.integers(0, 3))
        node.meta["allocations"] = tuple(Allocation(NBYTES, None) for _ in range(pieces)) + tuple(
            Allocation(NBYTES, number) for number in range(2)
        )
    figures = PlanMemory().apply(built.program, CONTEXT).statistics
    assert figures["arena bytes"] <= 1.1 * figures["lower bound"]
    lifetimes = Lifetimes(built.graph)
    for first, one in enumerate(lifetimes.tensors):
        for second, other in enumerate(lifetimes.tensors[:first]):
            apart = _ended_before(lifetimes, other, one) or _ended_before(lifetimes, one, other)
            assert (second in lifetimes.conflicts[first]) != apart
    assert accepted(built)


def _ended_before(lifetimes: Lifetimes, first: NewTensor, second: NewTensor) -> bool:
    before = lifetimes.order.before(second.maker)
    return all(before & lifetimes.order.bit(node) for node in first.uses)


def clear_call_buffers(built: Built) -> None:
    """The places of a call's several results are then those of the items alone."""
    for node in built.work:
        node.meta.pop("buffers", None)


def test_the_mutations_do_harm() -> None:
    built = forked(WIDE)
    harmful = sum(not is_safe(built) for _ in without_each_wait(built))
    waits = sum(len(node.meta.get("waits", ())) for node in built.graph.nodes)
    assert waits >= 5 and harmful >= 5
    PlanMemory().apply(built.program, CONTEXT)
    places = plan_of(built)
    assert len(set(places.values())) < len(places), "nothing is used twice"


def test_an_item_that_nothing_takes_is_written_all_the_same() -> None:
    built = build([("sort", 0, 0), ("add", 1, 1), ("add", 1, 2)])
    sort, add = built.work[:2]
    sort.meta["buffers"] = ((0, NBYTES), (NBYTES, NBYTES))
    assert accepted(built)
    add.meta["buffer"] = (2 * NBYTES, NBYTES)
    assert accepted(built)
    sort.meta["buffers"] = ((0, NBYTES), (8, NBYTES))
    assert not accepted(built)


def test_the_error_names_both_nodes_the_edge_and_the_remedy() -> None:
    built = build([("add", 0, 1), ("add", 3, 1), ("add_", 4, 3)])
    built.work[1].meta["stream"] = 1
    with pytest.raises(ScheduleError) as caught:
        VerifySchedule().apply(built.program, CONTEXT)
    text = str(caught.value)
    assert "add_1 (stream 1) may begin before add (stream 0) is done: it takes its result" in text
    assert "the edge add -> add_1 is missing; --disable-pass assign-streams" in text
    assert "add_ (stream 0) may begin before add_1 (stream 1) is done" in text
    assert caught.value.node is built.work[1]


def test_a_violation_ends_the_compilation_with_its_own_words() -> None:
    built = build([("add", 0, 1), ("add", 3, 1)])
    built.work[1].meta["buffer"] = (0, NBYTES // 2)
    with pytest.raises(CompileError, match=r"^the schedule is not safe: add_1 takes 16 bytes, and the arena has 8"):
        run_pipeline(built.program, Pipeline.parse("verify-schedule"), CONTEXT)


def test_a_stream_that_is_never_joined_is_named() -> None:
    built = build([("add", 0, 1), ("add", 1, 2), ("add", 0, 2)], outputs=1)
    built.work[1].meta["stream"] = 2
    with pytest.raises(ScheduleError, match=r"output .* before add_1 .stream 2. is done: stream 2 is not joined"):
        VerifySchedule().apply(built.program, CONTEXT)


@pytest.mark.parametrize("waits", [("add_1",), ("nothing",)], ids=["later", "unknown"])
def test_a_wait_for_what_is_not_queued_is_an_error(waits: tuple[str, ...]) -> None:
    built = build([("add", 0, 1), ("add", 1, 2)])
    built.work[0].meta["waits"] = waits
    with pytest.raises(CompileError, match=f"node add on stream 0 waits for {waits[0]}, which is not queued before"):
        VerifySchedule().apply(built.program, CONTEXT)


def test_inputs_and_views_can_have_no_buffer() -> None:
    built = build([("view", 0, 0), ("add", 3, 1), ("add", 4, 4)])
    view = built.node("view")
    view.meta["buffer"] = (0, NBYTES)
    with pytest.raises(ScheduleError, match="view lies in the memory of x0 and can have no buffer of its own"):
        VerifySchedule().apply(built.program, CONTEXT)
    view.meta.pop("buffer")
    built.node("x1").meta["buffer"] = (0, NBYTES)
    with pytest.raises(ScheduleError, match="x1 is not computed by the step"):
        VerifySchedule().apply(built.program, CONTEXT)


def in_turn(*targets: Any) -> tuple[Graph, list[Node]]:
    """A graph of calls that share nothing."""
    graph, nodes = Graph(), list[Node]()
    with FakeTensorMode():
        value = torch.empty(4)
    for number, (target, *others) in enumerate(targets):
        node = graph.placeholder(f"x{number}")
        node.meta["val"] = value
        nodes.append(graph.call_function(target, (node, *others)))
        nodes[-1].meta["val"] = value
    graph.output(tuple(nodes))
    return graph, nodes


def test_collectives_and_in_place_random_numbers_keep_one_order() -> None:
    from kimigraph.ir.dependences import work_dependences

    gather = torch.ops._c10d_functional.all_reduce.default
    graph, nodes = in_turn((gather, "sum", "0"), (torch.ops.aten.uniform_.default,), (gather, "sum", "0"))
    found = work_dependences(graph)
    assert [[item.first for item in found[node]] for node in nodes] == [[], nodes[:1], nodes[1:2]]
    assert {item.kind for node in nodes for item in found[node]} == {"order of effects"}
