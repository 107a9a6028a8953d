"""Programs out of plain functions, and a way to run them that tells outputs and updated inputs."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.purity import mutated_arguments, storage_root
from kimigraph.passes.base import PassContext

sys.path.insert(0, str(Path(__file__).parent))  # for the models that several files share


def as_program(graph_module: GraphModule) -> CapturedProgram:
    """A program around a flat graph whose placeholders are all inputs; those that the graph writes count as mutated."""
    graph = graph_module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    results = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
    output.args = (tuple(results),)
    graph_module.recompile()
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta.setdefault("val", None)  # assertions return nothing
    written = {storage_root(found) for node in graph.nodes for found in mutated_arguments(node)}
    inputs = [
        InputSpec(
            node.name,
            "cache" if node in written else "input",
            f"argument.{node.name}",
            tuple(node.meta["val"].shape),
            tuple(node.meta["val"].stride()),
            str(node.meta["val"].dtype).removeprefix("torch."),
            mutated=node in written,
            value_range=None if node.meta["val"].dtype.is_floating_point else (0, 2),
        )
        for node in graph.nodes
        if node.op == "placeholder"
    ]
    outputs = tuple(OutputSpec(f"out_{index}", f"[{index}]") for index in range(len(results)))
    return CapturedProgram(graph_module, tuple(inputs), outputs)


def trace_in_place(function: Callable[..., Any], *tensors: torch.Tensor) -> CapturedProgram:
    """The ATen graph of ``function`` as it runs, writes in place included."""
    return as_program(make_fx(function, tracing_mode="fake")(*(tensor.clone() for tensor in tensors)))


def run_program(program: CapturedProgram, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(outputs, inputs afterwards) of one step on copies of ``tensors``."""
    program.graph_module.graph.lint()
    program.graph_module.recompile()
    copies = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        outputs = list(program.graph_module(*copies))
    return [output.clone() for output in outputs], copies


def count_targets(graph: Graph, target: Any) -> int:
    """How often the graph calls ``target``."""
    return sum(node.target is target for node in graph.nodes)


@pytest.fixture
def trace() -> Callable[..., CapturedProgram]:
    return trace_in_place


@pytest.fixture
def program_of() -> Callable[[GraphModule], CapturedProgram]:
    return as_program


@pytest.fixture
def run() -> Callable[..., tuple[list[torch.Tensor], list[torch.Tensor]]]:
    return run_program


@pytest.fixture
def count() -> Callable[[Graph, Any], int]:
    return count_targets


@pytest.fixture
def context() -> PassContext:
    return PassContext(CompileConfig())
