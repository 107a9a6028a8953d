"""A captured program as an ONNX model: states in, states out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from kimigraph.adapters.torch_export import FunctionalGraph, export_functional
from kimigraph.codegen.onnx.functions import Function, Semantics
from kimigraph.codegen.onnx.indexing import INDEXING
from kimigraph.codegen.onnx.layout import LAYOUT
from kimigraph.codegen.onnx.pointwise import POINTWISE
from kimigraph.codegen.onnx.products import PRODUCTS
from kimigraph.codegen.onnx.recurrence import RECURRENCE
from kimigraph.codegen.onnx.scope import Op, Port, Scope
from kimigraph.codegen.onnx.translation import Handler, Translation, unsupported
from kimigraph.ir.errors import CompileError
from kimigraph.ir.onnx_format import NEXT
from kimigraph.ir.open_sizes import sized
from kimigraph.ir.program import CapturedProgram, InputSpec

TABLE: dict[str, Handler] = {**POINTWISE, **LAYOUT, **INDEXING, **PRODUCTS, **RECURRENCE}


@dataclass(frozen=True)
class OnnxModel:
    """A model free of the onnx library. ``states`` maps inputs to the outputs that hold their new values."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    weights: dict[str, Tensor]
    ops: list[Op]
    functions: tuple[Function, ...]
    states: dict[str, str]
    metadata: dict[str, str] = field(default_factory=lambda: {})


def translate_program(program: CapturedProgram, flat: bool = False, bind: bool = True) -> OnnxModel:
    """The program as a model of the standard domain and, unless ``flat``, functions of the domain ``kimigraph``.

    Inputs and outputs have the outside names of the program's; a state that the step updates comes out as
    ``<name>.next``. Without ``bind`` weights are inputs too, in the order of the program's. Raises CompileError that
    lists every operator without a translation.
    """
    functional = _functional(program)
    semantics = Semantics(TABLE, flat)
    _check(functional, semantics)
    scope = Scope()
    translation = Translation(scope, TABLE, semantics)
    given = [(spec, item.node) for spec, item in zip(program.inputs, functional.inputs, strict=True)]
    translation.values |= {node: scope.unused(spec.source) for spec, node in given}
    translation.run(functional.graph)
    scope.note, scope.modules = "", ()
    outputs: list[Port] = []
    for spec, leaf in zip(program.outputs, functional.results, strict=True):
        outputs.append(_output(translation, spec.source, leaf))
    states: dict[str, str] = {}
    for spec, node in given:
        if node.name in functional.mutations:
            port = _output(translation, spec.source + NEXT, functional.mutations[node.name], spec.descriptor)
            states[spec.source] = port.name
            outputs.append(port)
    free = [spec for spec in program.inputs if not (bind and spec.bound) or spec.source in states]
    held = [spec for spec in program.inputs if bind and spec.bound and spec.source not in states]
    return OnnxModel(
        name=str(program.info.get("source", "model")),
        inputs=tuple(_port(spec) for spec in free),
        outputs=tuple(outputs),
        weights={spec.source: program.tensors[spec.name].detach() for spec in held},
        ops=scope.ops,
        functions=tuple(semantics.functions.values()),
        states=states,
    )


def _functional(program: CapturedProgram) -> FunctionalGraph:
    """The program's graph with its in-place updates as values again."""
    samples = [_sample(program, spec) for spec in program.inputs]
    functional = export_functional(program.graph_module, tuple(samples), {}, strict=False)
    held = [item.target or item.node.name for item in functional.inputs if item.value is not None]
    if held:
        raise CompileError(
            f"the graph holds tensors of its own, which ONNX export does not take: {_few(held)}. Make them buffers of "
            "the model"
        )
    return functional


def _sample(program: CapturedProgram, spec: InputSpec) -> Tensor:
    known = program.tensors.get(spec.name)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return torch.empty_strided(spec.shape, spec.stride, dtype=dtype) if known is None else known.detach()


def narrow_types(program: CapturedProgram) -> list[str]:
    """The 16-bit types among the inputs of a program: onnxruntime has no products in them on a CPU."""
    return sorted({spec.dtype for spec in program.inputs if spec.dtype in ("bfloat16", "float16")})


def _check(functional: FunctionalGraph, semantics: Semantics) -> None:
    missing = unsupported(functional.graph, TABLE)
    for node, body in semantics.bodies(functional.graph):
        missing += [(target, f"{node.name} ({inner})") for target, inner in unsupported(body, TABLE)]
    if missing:
        by_target: dict[str, list[str]] = {}
        for target, node in missing:
            by_target.setdefault(target, []).append(node)
        lines = [f"{target}: {_few(nodes)}" for target, nodes in sorted(by_target.items())]
        raise CompileError(
            f"{len(lines)} operators have no translation to ONNX. " + "; ".join(lines) + ". Leave out the part of the "
            "model that uses them, or write it with other operators"
        )


def _few(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")


def _port(spec: InputSpec) -> Port:
    return Port(spec.source, getattr(torch, spec.dtype), spec.shape, spec.descriptor)


def _output(t: Translation, name: str, leaf: Node, note: str = "") -> Port:
    """An output of its own name: ONNX has no second name for a value, nor an input that is an output."""
    value: Tensor = leaf.meta["val"]
    (made,) = t.scope.add("Identity", (t.name(leaf),), (t.scope.unused(name),))
    sizes = map(sized, value.shape)
    return Port(made, value.dtype, tuple(size if isinstance(size, int) else str(size) for size in sizes), note)
