"""Programs with weights, out of plain functions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.purity import mutated_arguments, storage_root
from kimigraph.passes.base import PassContext


def program_with_weights(function: Callable[..., Any], *tensors: torch.Tensor, weights: int) -> CapturedProgram:
    """The graph of ``function`` as it runs, its last ``weights`` arguments weights and bound."""
    with torch.no_grad():
        traced = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*(t.clone() for t in tensors))
    graph = traced.graph
    for node in graph.nodes:
        node.meta.setdefault("val", None)  # of an operator that returns nothing
    output = next(node for node in graph.nodes if node.op == "output")
    results = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
    output.args = (tuple(results),)
    traced.recompile()
    written = {storage_root(found) for node in graph.nodes for found in mutated_arguments(node)}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs: list[InputSpec] = []
    for number, (node, tensor) in enumerate(zip(placeholders, tensors, strict=True)):
        kind = "weight" if number >= len(placeholders) - weights else "cache" if node in written else "input"
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = InputSpec(node.name, kind, f"model.{node.name}", tuple(tensor.shape), tensor.stride(), dtype)
        inputs.append(replace(spec, mutated=node in written))
    outputs = tuple(OutputSpec(f"out_{index}", f"[{index}]") for index in range(len(results)))
    bound = {spec.name: tensor for spec, tensor in zip(inputs, tensors, strict=True) if spec.bound}
    return CapturedProgram(traced, tuple(inputs), outputs, bound)


def run_copies(program: CapturedProgram, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Outputs and inputs afterwards of one step on copies of ``tensors``."""
    program.graph_module.recompile()
    copies = [tensor.clone() for tensor in tensors]
    with torch.no_grad():
        outputs = list(program.graph_module(*copies))
    return [output.clone() for output in outputs] + copies


@pytest.fixture
def weighted() -> Callable[..., CapturedProgram]:
    return program_with_weights


@pytest.fixture
def run_all() -> Callable[..., list[torch.Tensor]]:
    return run_copies


@pytest.fixture
def context() -> PassContext:
    return PassContext(CompileConfig(target="cuda:sm_90"))
