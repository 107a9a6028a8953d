"""Small programs to test on."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import kimigraph.ir.operators  # noqa: F401  (registers the operators)
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec

Build = Callable[..., CapturedProgram]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def build() -> Build:
    """Trace a function of named tensors into a program; keywords say more about inputs (``x=dict(kind="weight")``)."""

    def build_program(
        function: Callable[..., Any], tensors: Mapping[str, torch.Tensor], **more: dict[str, Any]
    ) -> CapturedProgram:
        names = list(tensors)
        graph_module = make_fx(function, tracing_mode="fake")(*tensors.values())
        graph = graph_module.graph
        inputs = []
        for node, name in zip([n for n in graph.nodes if n.op == "placeholder"], names, strict=True):
            node.name = name
            value = tensors[name]
            spec = InputSpec(
                name, "input", name, tuple(value.shape), value.stride(), str(value.dtype).removeprefix("torch.")
            )
            inputs.append(replace(spec, **more.get(name, {})))
        output = next(iter(reversed(graph.nodes)))
        results = output.args[0]
        output.args = (tuple(results) if isinstance(results, list | tuple) else (results,),)
        outputs = tuple(OutputSpec(f"output_{i}", str(i)) for i in range(len(output.args[0])))
        graph_module.recompile()
        bound = {spec.name: tensors[spec.name] for spec in inputs if spec.bound}
        return CapturedProgram(graph_module, tuple(inputs), outputs, bound)

    return build_program
