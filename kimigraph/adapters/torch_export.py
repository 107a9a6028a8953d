# pyright: basic
# Reason: graph signatures, fake tensors and higher-order operators of torch.export are private or partly typed.
"""``torch.export`` down to a functional ATen graph."""

import importlib
import inspect
import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from kimigraph.ir.errors import UsageError


@dataclass(frozen=True)
class LiftedInput:
    """A placeholder of the functional graph. ``target`` names a parameter, buffer or constant; None for an argument."""

    node: Node
    kind: str
    target: str | None
    persistent: bool
    value: Tensor | None


@dataclass(frozen=True)
class FunctionalGraph:
    """A functional graph with its signature in plain terms.

    ``inputs`` are in placeholder order. ``arguments`` are the argument leaves in order: a placeholder node each.
    ``mutations`` maps the name of a placeholder to the node that holds its new value. ``results`` are the leaves of the
    model's own result: nodes or plain values.
    """

    graph: Graph
    inputs: tuple[LiftedInput, ...]
    mutations: dict[str, Node]
    results: tuple[Any, ...]
    in_spec: Any
    out_spec: Any


def export_functional(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, strict: bool
) -> FunctionalGraph:
    """Export ``module`` and make its graph functional, composite operators such as matmul kept whole.

    One that was loaded from a file is exported already.
    """
    with torch.no_grad(), _quiet():
        exported = _known(module, args, kwargs) or torch.export.export(module, args, kwargs, strict=strict)
        exported = exported.run_decompositions({})
    return _plain(exported)


def _known(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram | None:
    """The program that ``module`` was loaded from, where it is for tensors like these."""
    exported = vars(module).get("exported_program")
    if exported is None:
        return None
    given, wanted = (pytree.tree_flatten(call) for call in ((args, kwargs), exported.example_inputs))
    same = given[1] == wanted[1] and all(map(_alike, given[0], wanted[0]))
    return exported if same else None


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and one == other
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def load_exported(path: Path) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The module of a checked ``.pt2`` file, with its example inputs. UsageError where torch cannot load it."""
    importlib.import_module("kimigraph.ir.operators")
    try:
        with _quiet():
            exported = torch.export.load(str(path))
            guards: dict[str, Any] = {}
            if "check_guards" in inspect.signature(exported.module).parameters:
                guards["check_guards"] = False  # the sizes are fixed, and the executor compares them
            module = exported.module(**guards)
    except Exception as error:  # torch raises whatever a field that does not fit leads to
        reason = str(error).strip().partition("\n")[0]
        raise UsageError(f"{path}: torch {torch.__version__} cannot load it: {reason}") from error
    if exported.example_inputs is None:
        raise UsageError(f"{path} holds no example inputs: export it with torch.export.export(module, args)")
    vars(module)["exported_program"] = exported
    args, kwargs = exported.example_inputs
    return module, args, kwargs


def save_exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: Path, extra: dict[str, str]
) -> int:
    """Export ``module`` into a ``.pt2`` file with ``extra`` texts by name; returns the number of its calls."""
    with torch.no_grad(), _quiet():
        exported = torch.export.export(module, args, kwargs, strict=False)
        torch.export.save(exported, str(path), extra_files=dict(extra))
    return sum(node.op == "call_function" for node in exported.graph.nodes)


@contextmanager
def _quiet() -> Generator[None]:
    """Without what torch.export prints and logs about failures that are raised anyway, and its own deprecations."""
    loggers = [logging.getLogger(name) for name in ("torch.fx.experimental", "torch._dynamo", "torch.export")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _plain(exported: ExportedProgram) -> FunctionalGraph:
    signature, graph = exported.graph_signature, exported.graph_module.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    inputs = tuple(_lifted(spec, placeholders[spec.arg.name], exported) for spec in signature.input_specs)
    by_target = {item.target: item.node.name for item in inputs if item.target is not None}
    mutations: dict[str, Node] = {}
    results: list[Any] = []
    outputs: Any = graph.output_node().args[0]
    for spec, value in zip(signature.output_specs, outputs, strict=True):
        target: Any = spec.target
        if spec.kind == OutputKind.USER_OUTPUT:
            results.append(value)
        elif spec.kind == OutputKind.USER_INPUT_MUTATION:
            mutations[target] = value
        elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
            mutations[by_target[target]] = value
        else:
            raise NotImplementedError(f"the model returns a {spec.kind.name.lower()}")
    call = exported.call_spec
    return FunctionalGraph(graph, inputs, mutations, tuple(results), call.in_spec, call.out_spec)


def _lifted(spec: Any, node: Node, exported: ExportedProgram) -> LiftedInput:
    kind, target = spec.kind, spec.target
    constants: Any = exported.constants
    if kind == InputKind.USER_INPUT:
        return LiftedInput(node, "argument", None, False, None)
    if kind == InputKind.PARAMETER:
        return LiftedInput(node, "parameter", target, True, exported.state_dict[target])
    if kind == InputKind.BUFFER:
        held = exported.state_dict if spec.persistent else constants
        return LiftedInput(node, "buffer", target, bool(spec.persistent), held[target])
    if kind == InputKind.CONSTANT_TENSOR:
        return LiftedInput(node, "constant", target, False, constants[target])
    raise NotImplementedError(f"the model holds a {kind.name.lower()} ({target})")


@dataclass(frozen=True)
class WrittenArgument:
    """A mutated argument of a functionalized call: which base, and the part of it (None: all of it).

    ``region`` is the overload and arguments of the view that gives the part; offsets count from the base's start.
    """

    base: int
    region: tuple[Any, tuple[Any, ...]] | None


@dataclass(frozen=True)
class FunctionalizedCall:
    """An ``auto_functionalized_v2`` node taken apart: ``operator(**plain, **written)`` over ``bases``.

    ``results`` is the number of the operator's own results; the new value of base i follows them at place results + i.
    """

    operator: Any
    plain: dict[str, Any]
    written: dict[str, WrittenArgument]
    bases: list[Node]
    results: int


def functionalized_call(node: Any) -> FunctionalizedCall | None:
    """``node`` taken apart, or None when it is no ``auto_functionalized_v2`` call."""
    if not isinstance(node, Node) or node.op != "call_function" or str(node.target) != "auto_functionalized_v2":
        return None
    operator: Any = node.args[0]
    bases: list[Any] = list(cast(Any, node.kwargs["_all_bases"]))
    plain = {key: value for key, value in node.kwargs.items() if not key.startswith("_")}
    written: dict[str, WrittenArgument] = {}
    for key, value in node.kwargs.items():
        base: Any = value
        name = key[1 : -len("_base_index")]
        if not key.endswith("_base_index"):
            continue
        if base is None:
            plain[name] = None
        else:
            written[name] = WrittenArgument(base, _region(node.kwargs, name, bases[base]))
    return FunctionalizedCall(operator, plain, written, bases, max(len(operator._schema.returns), 1))


def _region(fields: Any, name: str, base: Node) -> tuple[Any, tuple[Any, ...]] | None:
    if f"_{name}_size" in fields:
        offset = fields[f"_{name}_storage_offset"] - base.meta["val"].storage_offset()
        return torch.ops.aten.as_strided.default, (fields[f"_{name}_size"], fields[f"_{name}_stride"], offset)
    if f"_{name}_slice_dim" in fields:
        part = tuple(fields[f"_{name}_slice_{end}"] for end in ("dim", "start", "end"))
        return torch.ops.aten.slice.Tensor, part
    return None
