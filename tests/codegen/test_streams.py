"""Several streams in program.py: its text, and that the events in it order what the graph orders."""

import operator
from typing import Any

import pytest
import torch
from torch.fx import Node

from kimigraph.codegen import build_artifact
from kimigraph.codegen.kernel_writer import build_kernels
from kimigraph.codegen.program_writer import ProgramTitle, program_text
from kimigraph.ir.errors import CompileError
from kimigraph.ir.manifest import Manifest
from kimigraph.runtime.executor import load_program

aten = torch.ops.aten


def diamond(toolbox: Any, streams: Any = (0, 1, 0, 1, 0)) -> Any:
    """a -> (b, c) -> d, and a write of d into a cache on the side: ``streams`` in that order."""
    inputs = [toolbox.spec("x", (4, 4)), toolbox.spec("cache", (4, 4), "cache", mutated=True)]

    def build(graph: Any, x: Node, cache: Node) -> list[Node]:
        a = graph.call_function(aten.mm.default, (x, x))
        b = graph.call_function(aten.relu.default, (a,))
        c = graph.call_function(aten.neg.default, (a,))
        t = graph.call_function(aten.abs.default, (b,))
        d = graph.call_function(aten.add.Tensor, (t, c))
        nodes = [a, b, c, t, d]
        for node, stream in zip(nodes, streams, strict=True):
            node.meta["stream"] = stream
            node.meta["waits"] = tuple(
                used.name for used in node.all_input_nodes if used in nodes and used.meta["stream"] != stream
            )
        graph.call_function(aten.copy_.default, (cache, b)).meta["stream"] = streams[1]
        return [d]

    return toolbox.make_program(inputs, build)


def body(program: Any, target: str = "cpu:reference") -> str:
    text = program_text(program, build_kernels(program.graph_module.graph, target), ProgramTitle("t", "", "", target))
    return text.partition('"""One step;')[2].partition("\n")[2].partition("\n\n\n")[0]


def test_the_text_says_which_stream_what_it_waits_for_and_where_all_join(toolbox: Any) -> None:
    assert body(diamond(toolbox)) == "\n".join(
        [
            "    lanes = streams.fork(DEVICE, 2)",
            "    # top",
            "    mm_default = aten.mm.default(x, x)  # float32[4, 4]",
            '    lanes.record("mm_default")',
            "    with lanes[1]:",
            '        lanes.wait("mm_default")',
            "        relu_default = aten.relu.default(mm_default)  # float32[4, 4]",
            "    neg_default = aten.neg.default(mm_default)  # float32[4, 4]",
            "    with lanes[1]:",
            "        abs_default = aten.abs.default(relu_default)  # float32[4, 4]",
            '        lanes.record("abs_default")',
            '    lanes.wait("abs_default")',
            "    add_tensor = aten.add.Tensor(abs_default, neg_default)  # float32[4, 4]",
            "    del neg_default",  # the others are read by two streams, or on one that is not theirs
            "    with lanes[1]:",
            "        aten.copy_.default(cache, relu_default)  # copy__default: float32[4, 4]",
            "        del relu_default",
            "    lanes.join()",
            "    return (add_tensor,)",
        ]
    )


def test_a_program_of_one_stream_is_written_as_before(toolbox: Any) -> None:
    plain = diamond(toolbox, (0,) * 5)
    for node in plain.graph_module.graph.nodes:
        node.meta.pop("stream", None)
        node.meta.pop("waits", None)
    assert body(diamond(toolbox, (0,) * 5)) == body(plain)
    assert "lanes" not in body(plain)


class Recorder:
    """Lanes that keep a clock for each stream: what is queued knows what has happened before it."""

    def __init__(self, count: int) -> None:
        self.clocks = [dict[str, int]() for _ in range(count)]
        self.events: dict[str, dict[str, int]] = {}
        self.lane = 0
        self.joined = False

    def __getitem__(self, number: int) -> "Recorder":
        self.entered = number
        return self

    def __enter__(self) -> None:
        self.lane = self.entered

    def __exit__(self, *_: object) -> None:
        self.lane = 0

    def record(self, name: str) -> None:
        self.events[name] = dict(self.clocks[self.lane])

    def wait(self, *names: str) -> None:
        for name in names:
            self.clocks[self.lane].update(self.events[name])

    def join(self) -> None:
        assert self.lane == 0
        self.joined = True


@pytest.mark.parametrize("streams", [(0, 1, 0, 1, 0), (0, 1, 2, 1, 0), (1, 2, 1, 2, 3), (2, 1, 0, 1, 2)])
def test_every_value_is_computed_before_it_is_read(toolbox: Any, tmp_path: Any, streams: Any) -> None:
    build_artifact(diamond(toolbox, streams), "cpu:reference", tmp_path, self_test=False)
    assert Manifest.read(tmp_path).streams == max(streams) + 1
    step: Any = load_program(tmp_path).step
    names = step.__wrapped__.__globals__
    x = torch.randn(4, 4)
    wanted = (x @ x).relu().abs() - x @ x
    torch.testing.assert_close(step(x, torch.zeros(4, 4))[0], wanted)  # lanes on a CPU: the order of the program

    lanes = Recorder(max(streams) + 1)
    made: dict[int, str] = {}

    class Watching:
        def __getattr__(self, packet: str) -> Any:
            class Overloads:
                def __getattr__(self, overload: str) -> Any:
                    def call(*arguments: Any) -> Any:
                        for tensor in arguments:
                            known = made.get(id(tensor))
                            assert known is None or known in lanes.clocks[lanes.lane], f"{packet} reads {known} early"
                        result = getattr(getattr(aten, packet), overload)(*arguments)
                        made[id(result)] = packet
                        lanes.clocks[lanes.lane][packet] = 1
                        return result

                    return call

            return Overloads()

    names["aten"] = Watching()
    names["streams"] = type("Streams", (), {"fork": staticmethod(lambda device, count: lanes)})
    step(x, torch.zeros(4, 4))
    assert lanes.joined


def test_a_wait_for_what_is_not_queued_yet_is_an_error(toolbox: Any) -> None:
    program = diamond(toolbox)
    first = next(node for node in program.graph_module.graph.nodes if node.target is aten.mm.default)
    first.meta["waits"] = ("add_tensor",)
    with pytest.raises(CompileError, match=r"mm_default on stream 0 waits for add_tensor.*assign-streams"):
        body(program)


def attentions(toolbox: Any, streams: Any) -> Any:
    """One kernel whose programs meet at counters that a launch leaves for the next one, on several streams."""

    def bf16(name: str, *shape: int, kind: str = "input") -> Any:
        return toolbox.spec(name, shape, kind, "bfloat16")

    inputs = [
        *(bf16("q_latent", 1, 1, 64, 512), bf16("q_rope", 1, 1, 64, 64)),
        *(bf16("latent", 1, 4096, 512, kind="cache"), bf16("rope", 1, 4096, 64, kind="cache")),
        toolbox.spec("indices", (1, 1, 512), dtype="int32"),
    ]

    def build(graph: Any, *nodes: Node) -> list[Node]:
        found = [toolbox.call(graph, "sparse_attention", *nodes, scale=0.1) for _ in streams]
        for node, stream in zip(found, streams, strict=True):
            node.meta["stream"] = stream
        return [graph.call_function(operator.getitem, (node, 0)) for node in found]

    return toolbox.make_program(inputs, build)


def test_a_kernel_with_a_state_has_one_for_each_stream(toolbox: Any) -> None:
    program = attentions(toolbox, (0, 1, 0))
    kernels = build_kernels(program.graph_module.graph, "cuda:sm_90")
    (file,) = kernels.files
    assert file.keeps_state and file.instances() == ["sparse_attention_0", "sparse_attention_0_on_1"]
    assert len(kernels.imports()) == 2 + 1 + 2 + 1
    text = body(program, "cuda:sm_90")
    assert text.count("kernels.sparse_attention_0(") == 2 and text.count("kernels.sparse_attention_0_on_1(") == 1
    (plain,) = build_kernels(attentions(toolbox, (1, 1)).graph_module.graph, "cuda:sm_90").files
    assert plain.instances() == ["sparse_attention_0"]
