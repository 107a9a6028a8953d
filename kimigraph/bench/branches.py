"""A wide program by hand: chains over one input on several streams, each of which reads the chain beside it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.fake import infer_all
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.schedule import stream_of
from kimigraph.passes import Pipeline, run_pipeline
from kimigraph.session import pass_context

BRANCHES, ROUNDS, WIDTH = 6, 3, 512


def branches(streams: int, target: str = "cuda", width: int = WIDTH) -> CapturedProgram:
    """``BRANCHES`` chains of products on ``streams`` streams, in a planned arena, and a cache that their sum goes into.

    The plan and the schedule are checked as those of any program.
    """
    graph, mode = Graph(), FakeTensorMode()
    x, sums = graph.placeholder("x"), graph.placeholder("sums")
    with mode:
        x.meta["val"], sums.meta["val"] = torch.empty(width, width), torch.empty(width)
    output = graph.output((_chains(graph, x, sums, streams),))
    last = {stream_of(node): node.name for node in graph.nodes}
    output.meta["waits"] = tuple(name for stream, name in last.items() if stream)
    module = GraphModule(torch.nn.Module(), graph)
    infer_all(module)
    inputs = (
        InputSpec("x", "input", "x", (width, width), (width, 1), "float32"),
        InputSpec("sums", "cache", "sums", (width,), (1,), "float32", mutated=True),
    )
    program = CapturedProgram(module, inputs, (OutputSpec("total", "total"),), info={"model_type": "branches"})
    run_pipeline(program, Pipeline.parse("plan-memory,verify-schedule"), pass_context(CompileConfig(target=target)))
    return program


def _chains(graph: Graph, x: Node, sums: Node, streams: int) -> Node:
    aten = torch.ops.aten

    def node(target: Any, stream: int, *args: Any) -> Node:
        new = graph.call_function(target, args)
        new.meta["stream"] = stream
        new.meta["waits"] = tuple(item.name for item in new.all_input_nodes if _is_aside(item, stream))
        return new

    heads = [node(aten.mul.Tensor, chain % streams, x, 0.01 * (chain + 1)) for chain in range(BRANCHES)]
    for _ in range(ROUNDS):
        tails = [node(aten.mm.default, chain % streams, head, x) for chain, head in enumerate(heads)]
        tails = [node(aten.sigmoid.default, chain % streams, tail) for chain, tail in enumerate(tails)]
        pairs: Iterable[tuple[Node, Node]] = zip(tails, [*tails[1:], tails[0]], strict=True)
        heads = [node(aten.sub.Tensor, chain % streams, *pair) for chain, pair in enumerate(pairs)]
    total = heads[0]
    for head in heads[1:]:
        total = node(aten.add.Tensor, 0, total, head)
    node(aten.add_.Tensor, streams - 1, sums, node(aten.sum.dim_IntList, streams - 1, total, [0]))
    return total


def _is_aside(item: Node, stream: int) -> bool:
    return item.op != "placeholder" and item.meta["stream"] != stream
