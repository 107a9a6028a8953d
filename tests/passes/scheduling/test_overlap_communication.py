"""``overlap-communication``: what moves, what stays, that values and the order of collectives are those of before."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.collectives import is_collective, number_collectives, pairs
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.fake import infer
from kimigraph.ir.halves import mark_doubled, mark_waiting
from kimigraph.ir.lock_step import run_ranks
from kimigraph.ir.mesh import COLLECTIVES, TP_GROUP
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.remarks import PassResult
from kimigraph.passes.assign_streams import AssignStreams
from kimigraph.passes.base import PassContext
from kimigraph.passes.overlap_communication import OverlapCommunication
from kimigraph.passes.sharding.joined import join_sums
from kimigraph.passes.verify_schedule import ScheduleError, VerifySchedule

ATEN = torch.ops.aten
C10D: Any = getattr(torch.ops, COLLECTIVES)
CONTEXT = PassContext(CompileConfig(target="cuda:sm_90", tp=2))


class Built:
    """A graph under construction over inputs of the given shapes."""

    def __init__(self, dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> None:
        self.graph, specs = Graph(), list[InputSpec]()
        self.nodes: dict[str, Node] = {}
        with FakeTensorMode():
            for name, shape in shapes.items():
                node = self.nodes[name] = self.graph.placeholder(name)
                node.meta["val"] = torch.empty(shape, dtype=dtype)
                stride = tuple(node.meta["val"].stride())
                specs.append(InputSpec(name, "input", name, shape, stride, str(dtype).removeprefix("torch.")))
        self.inputs = tuple(specs)

    def call(self, name: str, target: Any, *arguments: Any) -> Node:
        node = self.nodes[name] = self.graph.create_node("call_function", target, arguments, name=name)
        infer(node)
        return node

    def summed(self, name: str, addend: Node) -> Node:
        self.call(name, C10D.all_reduce.default, addend, "sum", TP_GROUP)
        return self.call(f"{name}_wait", C10D.wait_tensor.default, self.nodes[name])

    def gathered(self, name: str, part: Node) -> Node:
        self.call(name, C10D.all_gather_into_tensor.default, part, 2, TP_GROUP)
        return self.call(f"{name}_wait", C10D.wait_tensor.default, self.nodes[name])

    def exchanged(self, name: str, parts: Node) -> Node:
        half = parts.meta["val"].shape[0] // 2
        self.call(name, C10D.all_to_all_single.default, parts, [half, half], [half, half], TP_GROUP)
        return self.call(f"{name}_wait", C10D.wait_tensor.default, self.nodes[name])

    def program(self, *results: Node) -> CapturedProgram:
        self.graph.output(tuple(results))
        module = GraphModule(torch.nn.Module(), self.graph)
        outputs = tuple(OutputSpec(f"out_{number}", f"out_{number}") for number in range(len(results)))
        return CapturedProgram(module, self.inputs, outputs)


def busy(rows: int = 65536) -> tuple[Built, CapturedProgram]:
    """A sum that one operation needs, and of another branch behind it a product of so many rows that does not, with
    views; a second sum at the end."""
    built = Built(x=(64, 32), y=(rows, 32), w=(32, 32), z=(64, 32))
    x, y, w = (built.nodes[name] for name in "xyw")
    first = built.call("first", ATEN.mm.default, x, w)
    whole = built.summed("sum_first", first)
    used = built.call("used", ATEN.relu.default, whole)
    aside = built.call("aside", ATEN.mm.default, y, w)
    more = built.call("more", ATEN.slice.Tensor, aside, 0, 0, 64)
    turned = built.call("turned", ATEN.transpose.int, built.nodes["z"], 0, 1)
    joined = built.call("joined", ATEN.add.Tensor, used, more)
    joined = built.call("scaled", ATEN.mul.Tensor, joined, built.call("back", ATEN.transpose.int, turned, 0, 1))
    last = built.summed("sum_last", joined)
    return built, built.program(built.call("out", ATEN.neg.default, last))


def order(program: CapturedProgram) -> list[str]:
    return [node.name for node in program.graph_module.graph.nodes if node.op == "call_function"]


def results(program: CapturedProgram) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    ranks = [[torch.randn(spec.shape) for spec in program.inputs] for _ in range(2)]
    return run_ranks(program.graph_module, ranks)


def messages(result: PassResult, kind: str) -> list[str]:
    return [remark.message for remark in result.remarks if remark.kind == kind]


def test_work_that_does_not_wait_for_a_sum_goes_in_front_of_its_wait() -> None:
    _, program = busy()
    before = results(program)
    result = OverlapCommunication().apply(program, CONTEXT)
    assert result.modified
    behind = [
        "sum_first_wait",
        "used",
        "more",
        "turned",
        "joined",
        "back",
        "scaled",
        "sum_last",
        "sum_last_wait",
        "out",
    ]
    assert order(program) == ["first", "sum_first", "aside", *behind]  # views that hide nothing stay
    for [one], [two] in zip(before, results(program), strict=True):
        assert torch.equal(one, two)
    [told] = messages(result, "passed")
    assert "sum_first (13.0 us) runs beside" in told and "; aside moved in front of its wait" in told
    [missed] = messages(result, "missed")
    assert "1 collectives stay as they are (sum_last)" in missed
    assert result.statistics["collectives"] == 2 and result.statistics["hidden_ns"] > 0
    VerifySchedule().apply(program, CONTEXT)


def test_work_that_takes_less_than_it_may_cost_the_host_stays() -> None:
    _, program = busy(rows=64)
    before = order(program)
    result = OverlapCommunication().apply(program, CONTEXT)
    assert order(program) == before and not result.modified and result.statistics["without_work"] == 2


def test_a_wait_sinks_to_the_first_use() -> None:
    built = Built(x=(8, 8), y=(8, 8))
    early = built.summed("total", built.nodes["x"])
    shown = built.call("shown", ATEN.view.default, early, [64])
    other = built.call("other", ATEN.exp.default, built.nodes["y"])
    flat = built.call("flat", ATEN.reshape.default, other, [64])
    program = built.program(built.call("out", ATEN.add.Tensor, shown, flat))
    OverlapCommunication().apply(program, CONTEXT)
    assert order(program) == ["total", "other", "flat", "total_wait", "shown", "out"]


def test_a_collective_begins_when_its_input_is_there() -> None:
    built = Built(x=(8, 8), y=(8, 8))
    made = built.call("made", ATEN.exp.default, built.nodes["x"])
    other = built.call("other", ATEN.sin.default, built.nodes["y"])
    whole = built.gathered("gather", made)
    twice = built.call("twice", ATEN.cat.default, [other, other])
    program = built.program(built.call("out", ATEN.add.Tensor, whole, twice))
    OverlapCommunication().apply(program, CONTEXT)
    assert order(program) == ["made", "gather", "other", "twice", "gather_wait", "out"]


def test_a_chain_is_left_alone_with_the_reason() -> None:
    built = Built(x=(8, 8), w=(8, 8))
    made = built.call("made", ATEN.mm.default, built.nodes["x"], built.nodes["w"])
    program = built.program(built.call("out", ATEN.relu.default, built.summed("total", made)))
    before = order(program)
    result = OverlapCommunication().apply(program, CONTEXT)
    assert not result.modified and order(program) == before
    assert "nothing else is there to be done meanwhile" in messages(result, "missed")[0]


def test_what_writes_is_not_moved_in_front_of_what_reads() -> None:
    built = Built(x=(8, 8), cache=(8, 8), y=(8, 8))
    whole = built.summed("total", built.nodes["x"])
    read = built.call("read", ATEN.add.Tensor, whole, built.nodes["cache"])
    written = built.call("written", ATEN.copy_.default, built.nodes["cache"], built.nodes["y"])
    later = built.call("later", ATEN.exp.default, written)
    program = built.program(built.call("out", ATEN.add.Tensor, read, later))
    result = OverlapCommunication().apply(program, CONTEXT)
    assert not result.modified and order(program)[:3] == ["total", "total_wait", "read"]


def test_programs_of_one_rank_are_not_looked_at() -> None:
    built = Built(x=(8, 8))
    program = built.program(built.call("out", ATEN.exp.default, built.nodes["x"]))
    assert OverlapCommunication().apply(program, CONTEXT) == PassResult(False)


def product(rows: int, dtype: torch.dtype, inner: int, outer: int) -> CapturedProgram:
    """A sum of a product, such as that behind attention."""
    built = Built(dtype, x=(1, rows, inner), w=(outer, inner))
    made = built.call("made", ATEN.linear.default, built.nodes["x"], built.nodes["w"])
    return built.program(built.call("out", ATEN.relu.default, built.summed("total", made)))


def test_a_long_product_is_summed_in_parts() -> None:
    long, short = product(8192, torch.bfloat16, 6144, 7168), product(64, torch.bfloat16, 6144, 7168)
    assert OverlapCommunication().apply(product(8192, torch.bfloat16, 6144, 7168), CONTEXT).statistics["split"] == 0
    result = OverlapCommunication(split=True).apply(long, CONTEXT)
    assert result.statistics["split"] == 1 and result.statistics["collectives"] == 4
    assert "multiplied and summed in 4 parts" in messages(result, "passed")[0]
    assert order(long).count("linear") + sum(name.startswith("linear_") for name in order(long)) == 4
    VerifySchedule().apply(long, CONTEXT)
    assert OverlapCommunication(split=True).apply(short, CONTEXT).statistics["split"] == 0


def test_parts_compute_what_the_whole_does() -> None:
    program = product(12, torch.float32, 16, 8)
    before = results(program)
    assert OverlapCommunication(split=True, least_gain_us=-1e9).apply(program, CONTEXT).statistics["split"] == 1
    for one, two in zip(before, results(program), strict=True):
        torch.testing.assert_close(one, two)
    # Every sum but the last is under way while the next part is multiplied.
    names = order(program)
    starts = [names.index(pair.start.name) for pair in pairs(program.graph_module.graph)]
    products = [place for place, name in enumerate(names) if name.startswith("linear")]
    assert starts == sorted(starts) and all(start < later for start, later in zip(starts, products[1:], strict=False))


@pytest.mark.parametrize(("rows", "joined"), [(16, 1), (1024, 0)])
def test_short_sums_are_joined_and_a_long_one_begins_before_the_work_for_the_other(rows: int, joined: int) -> None:
    """Routed and shared experts: the sum of the second does not wait for that of the first."""
    built = Built(x=(rows, 8), w=(8, 2048), v=(8, 2048))
    x, w, v = (built.nodes[name] for name in "xwv")
    routed = built.summed("routed_sum", built.call("routed", ATEN.mm.default, x, w))
    normed = built.call("normed", ATEN.tanh.default, routed)
    shared = built.summed("shared_sum", built.call("shared", ATEN.mm.default, x, v))
    program = built.program(built.call("out", ATEN.add.Tensor, normed, shared))
    before = results(program)
    assert join_sums(built.graph) == joined
    built.graph.lint()
    program.graph_module.recompile()
    for one, two in zip(before, results(program), strict=True):
        torch.testing.assert_close(one, two)
    if joined:
        assert sum(is_collective(node) for node in built.graph.nodes) == 1
        return
    OverlapCommunication().apply(program, CONTEXT)
    assert order(program) == (
        ["shared", "shared_sum", "routed", "routed_sum", "routed_sum_wait", "normed", "shared_sum_wait", "out"]
    )
    VerifySchedule().apply(program, CONTEXT)


def halved(crossed: bool = False) -> CapturedProgram:
    """Two layers of a step, each a product and a sum over ranks, for two halves of a batch, one behind the other."""
    built = Built(x0=(8, 8), x1=(8, 8), w=(8, 8))
    results: list[Node] = []
    for half in range(2):
        value = built.nodes[f"x{half}"]
        for layer in range(2):
            made = built.call(f"product{layer}_{half}", ATEN.mm.default, value, built.nodes["w"])
            whole = built.summed(f"sum{layer}_{half}", made)
            other = results[0] if crossed and half and not layer else whole
            value = built.call(f"relu{layer}_{half}", ATEN.add.Tensor, whole, other)
        results.append(value)
    for node in built.graph.nodes:
        if node.op == "call_function":
            node.meta["branch"] = f"half {node.name.rpartition('_')[2] if 'wait' not in node.name else node.name[5]}"
    program = built.program(built.call("joined", ATEN.cat.default, results))
    mark_waiting(program, 8)
    mark_doubled(program)
    return program


def test_halves_of_a_batch_take_turns_where_they_wait() -> None:
    program = halved()
    before = results(program)
    result = OverlapCommunication().apply(program, CONTEXT)
    assert order(program) == [
        *("product0_0", "sum0_0", "product0_1", "sum0_1"),
        *("sum0_0_wait", "relu0_0", "product1_0", "sum1_0", "sum0_1_wait", "relu0_1", "product1_1", "sum1_1"),
        *("sum1_0_wait", "relu1_0", "sum1_1_wait", "relu1_1", "joined"),
    ]
    for [one], [two] in zip(before, results(program), strict=True):
        assert torch.equal(one, two)
    assert len(messages(result, "passed")) == 5 and "take turns where they wait" in messages(result, "passed")[-1]
    AssignStreams().apply(program, CONTEXT)
    VerifySchedule().apply(program, CONTEXT)


def test_what_needs_both_halves_comes_behind_them() -> None:
    program = halved(crossed=True)
    before = results(program)
    OverlapCommunication().apply(program, CONTEXT)
    starts = [node.name for node in program.graph_module.graph.nodes if is_collective(node)]
    assert starts == ["sum0_0", "sum0_1", "sum1_0", "sum1_1"]
    for [one], [two] in zip(before, results(program), strict=True):
        assert torch.equal(one, two)
    VerifySchedule().apply(program, CONTEXT)


def test_no_scheduler_moves_a_collective_past_another() -> None:
    built, program = busy()
    number_collectives(built.graph)
    AssignStreams(streams=3, force=True).apply(program, CONTEXT)
    OverlapCommunication().apply(program, CONTEXT)
    AssignStreams(streams=3, force=True, whole=True).apply(program, CONTEXT)
    graph = program.graph_module.graph
    assert [node.name for node in graph.nodes if is_collective(node)] == ["sum_first", "sum_last"]
    assert all(pair.start < pair.wait for pair in pairs(graph))
    VerifySchedule().apply(program, CONTEXT)


def faults(program: CapturedProgram) -> Sequence[str]:
    with pytest.raises(ScheduleError) as error:
        VerifySchedule().apply(program, CONTEXT)
    return [violation.describe() for violation in error.value.violations]


def two_sums() -> tuple[Built, CapturedProgram]:
    built = Built(x=(8, 8), y=(8, 8))
    first, second = built.summed("one", built.nodes["x"]), built.summed("two", built.nodes["y"])
    program = built.program(built.call("out", ATEN.add.Tensor, first, second))
    OverlapCommunication().apply(program, CONTEXT)
    return built, program


def test_collectives_in_another_order_are_an_error_that_names_them() -> None:
    built, program = two_sums()
    built.nodes["one"].prepend(built.nodes["two"])
    [told] = faults(program)
    assert "two (collective 1) begins before one (collective 0)" in told and "all wait for one another" in told


def test_a_result_that_is_used_before_its_wait_is_an_error() -> None:
    built, program = two_sums()
    built.nodes["out"].replace_input_with(built.nodes["one_wait"], built.nodes["one"])
    built.graph.erase_node(built.nodes["one_wait"])
    told = faults(program)
    assert any("out uses what one communicates, and no wait stands between" in fault for fault in told)
    assert any("nothing waits for one" in fault for fault in told)


def gather_and_write(ordered: bool, by: str = "gathered") -> tuple[Built, CapturedProgram]:
    """A gather of a tensor that is written later: behind the wait, or while the others still read it."""
    built = Built(x=(8, 8), y=(8, 8))
    made = built.call("made", ATEN.exp.default, built.nodes["x"])
    whole = getattr(built, by)("gather", made)
    written = built.call("written", ATEN.copy_.default, made, built.nodes["y"])
    read = built.call("read", ATEN.sum.default, whole)
    program = built.program(built.call("out", ATEN.add.Tensor, written, read))
    if not ordered:
        built.nodes["written"].append(built.nodes["gather_wait"])
    return built, program


@pytest.mark.parametrize("by", ["gathered", "exchanged"])
def test_what_is_gathered_must_stay_until_the_wait(by: str) -> None:
    _, program = gather_and_write(True, by)
    VerifySchedule().apply(program, CONTEXT)
    OverlapCommunication().apply(program, CONTEXT)  # sinks the wait: not past the write
    VerifySchedule().apply(program, CONTEXT)
    _, program = gather_and_write(False, by)
    assert any("written (stream 0) writes made while gather reads it" in fault for fault in faults(program))


@pytest.mark.parametrize("by", ["gathered", "exchanged"])
def test_what_is_gathered_must_not_lie_in_the_arena(by: str) -> None:
    built, program = gather_and_write(True, by)
    built.nodes["made"].meta["buffer"] = (0, 256)
    assert any("made lies in the arena and gather reads it until its wait" in fault for fault in faults(program))


def test_a_reader_on_another_stream_waits_for_the_wait() -> None:
    """A collective is on a stream of the library's: the event that counts is the one behind ``wait_tensor``."""
    built = Built(x=(8, 8), y=(8, 8))
    made = built.call("made", ATEN.exp.default, built.nodes["x"])
    made.meta["stream"] = 1
    whole = built.gathered("gather", made)
    read = built.call("read", ATEN.neg.default, whole)
    read.meta["stream"] = 1
    program = built.program(read)
    built.nodes["gather"].meta["waits"] = ("made",)
    read.meta["waits"] = ("gather",)
    [*_, output] = built.graph.nodes
    output.meta["waits"] = ("read",)
    [told] = faults(program)
    assert "read (stream 1) may begin before gather_wait (stream 0) is done" in told
    read.meta["waits"] = ("gather_wait",)
    VerifySchedule().apply(program, CONTEXT)
    built.nodes["gather"].meta["waits"] = ()
    assert any("gather (stream 0) may begin before made (stream 1) is done" in fault for fault in faults(program))
