"""Capture of a module: export, checks, in-place updates, flat placeholders."""

from typing import Any

from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from kimigraph.adapters.torch_export import FunctionalGraph, export_functional
from kimigraph.capture.errors import describe_failure
from kimigraph.capture.flatten import flatten
from kimigraph.capture.hints import CaptureHints
from kimigraph.capture.marks import is_mark, marked
from kimigraph.capture.random import check_deterministic
from kimigraph.capture.reinplace import reinplace
from kimigraph.capture.signature import call_leaves, normalize_call, positional_parameters
from kimigraph.capture.watch import StateWatch
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CaptureError
from kimigraph.ir.program import CapturedProgram


def capture_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: CompileConfig,
    hints: CaptureHints | None = None,
) -> CapturedProgram:
    """Capture one call ``module(*args, **kwargs)`` as a program.

    Tensors among the arguments become inputs; those that the module writes are caches. The tensors given keep their
    values, and so does the module's state. Raises CaptureError when the module cannot be captured, draws random
    numbers, or changes tensors that are neither arguments nor registered buffers.
    """
    hints = hints or CaptureHints()
    name = type(module).__name__
    args, kwargs = pytree.tree_map(_own_memory, normalize_call(module, args, kwargs))
    with StateWatch(module, name), marked(config):
        functional = _export(module, args, kwargs, name)
    check_deterministic(functional.graph, name)
    statistics = reinplace(functional)
    state, leaves = module.state_dict(keep_vars=True), call_leaves(module, args, kwargs)
    program = flatten(functional, state, leaves, set(functional.mutations), hints)
    for node in program.graph_module.graph.nodes:
        if is_mark(node):
            node.meta["via"] = "mark"
    program.info.update(
        source=name,
        phase=config.phase,
        mutations=statistics,
        parameters=positional_parameters(module),
        argument_leaves=[_argument_record(leaf.value) for leaf in leaves],
        result_leaves=[_leaf_record(leaf) for leaf in functional.results],
    )
    return program


def _export(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> FunctionalGraph:
    """The exported graph; Dynamo's strict mode is tried where the default mode fails."""
    try:
        return export_functional(module, args, kwargs, strict=False)
    except Exception as first:  # torch.export raises whatever the traced code raises
        failure = describe_failure(name, first)
        try:
            return export_functional(module, args, kwargs, strict=True)
        except Exception:
            raise failure from first


def _own_memory(value: Any) -> Any:
    """An expanded tensor as a contiguous one: a program takes what any caller has, not elements that share memory."""
    expanded = isinstance(value, Tensor) and any(
        step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True)
    )
    return value.contiguous() if expanded else value


def _leaf_record(leaf: Any) -> Any:
    """How a leaf of the model's result comes back: a tensor, or a plain value as captured."""
    if isinstance(leaf, Node):
        return "tensor"
    if leaf is None or isinstance(leaf, bool | int | float | str):
        return {"value": leaf}
    raise CaptureError(f"the model returns a {type(leaf).__name__}, which is neither a tensor nor a plain value")


def _argument_record(leaf: Any) -> Any:
    """What a leaf of the call was: a tensor, a plain value, or the text of another object."""
    if isinstance(leaf, Tensor):
        return "tensor"
    plain = leaf is None or isinstance(leaf, bool | int | float | str)
    return {"value": leaf} if plain else {"text": repr(leaf)}


def tensors_of(program: CapturedProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors to run ``program``'s graph on: bound ones, then those of the call, in placeholder order."""
    leaves = pytree.tree_leaves((args, kwargs))
    given = iter([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    return [program.tensors[spec.name] if spec.bound else next(given) for spec in program.inputs]
