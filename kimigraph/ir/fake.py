"""Shapes and dtypes of new nodes: run a node's target on the fake values of its arguments."""

import logging
from collections.abc import Generator, Hashable, Iterable
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from kimigraph.ir.errors import CompileError


def fake_mode(graph: Graph) -> FakeTensorMode:
    """The mode that the graph's recorded values live in.

    Raises CompileError when no node holds a fake tensor.
    """
    for node in graph.nodes:
        mode = _mode_of([node.meta.get("val")])
        if mode is not None:
            return mode
    raise CompileError(
        "no node of the graph carries a fake tensor in meta['val'], so nothing can be inferred; "
        "placeholders get theirs at capture"
    )


def infer(node: Node) -> Any:
    """Give ``node`` its ``meta["val"]`` and return it; see ``compute``."""
    value = compute(node)
    if node.op != "output":
        node.meta["val"] = value
    return value


def compute(node: Node) -> Any:
    """The value of ``node`` from the values of its arguments; ``meta`` stays as it is, but for a region's nodes.

    Equal calls have one value between them: nobody writes to a fake tensor, and of sixty equal layers each would
    otherwise ask the same again. Works on call_function, call_method and call_module nodes (a region's nodes are
    inferred too), and on get_attr and output. Raises CompileError naming the node, its target and its arguments' shapes
    when an argument has no value or the target refuses the arguments.
    """
    try:
        with quiet():
            return _run(node)
    except Exception as error:
        raise CompileError(_failure(node, error)) from error


def infer_all(graph_module: GraphModule) -> None:
    """Give every node of the graph but placeholders its ``meta["val"]`` anew, regions included."""
    for node in graph_module.graph.nodes:
        if node.op != "placeholder":
            infer(node)
        elif "val" not in node.meta:
            raise CompileError(f"placeholder {node.name} has no meta['val']: a graph's inputs come with their shapes")


def _run(node: Node) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), _value)
    if node.op == "output":
        return args[0]
    if node.op == "call_module":
        return _run_region(_attribute(node), args)
    mode = _mode_of(argument.meta["val"] for argument in node.all_input_nodes) or fake_mode(node.graph)
    if node.op == "call_function":
        assert callable(node.target)
        # The values hold on to their mode, so what is known lies with it: a weak dictionary would never let them go.
        known: dict[Any, Any] = vars(mode).setdefault("_kimigraph_values", {})
        key = _call_key(node.target, args, kwargs)
        if key is None or key not in known:
            with mode, torch.no_grad():
                value = node.target(*args, **kwargs)
            if key is None:
                return value
            known[key] = value
        return known[key]
    with mode, torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "get_attr":
        value = _attribute(node)
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
    raise ValueError(f"a {node.op} has no value to infer")


def _call_key(target: Any, args: Any, kwargs: Any) -> Hashable | None:
    """What the value of a call follows from; None where that is more than what ``_facts`` tell."""
    try:
        key = target, _facts(args), _facts(kwargs)
        hash(key)
    except TypeError:
        return None
    return key


def _facts(value: Any) -> Hashable:
    """An argument by what a fake value can depend on: tensors by form, numbers by type too (1 is not 1.0 nor True)."""
    if isinstance(value, FakeTensor):
        sizes = (*value.shape, *value.stride(), value.storage_offset())
        if all(type(size) is int for size in sizes):
            return value.dtype, value.device, value.layout, value.dim(), sizes
    elif isinstance(value, list | tuple):
        return type(value), tuple(_facts(item) for item in cast("Iterable[Any]", value))
    elif isinstance(value, dict):
        return dict, tuple((name, _facts(item)) for name, item in cast("dict[str, Any]", value).items())
    elif value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device | torch.layout):
        return type(value), value.hex() if isinstance(value, float) else value
    raise TypeError(f"{type(value).__name__} has no form that could be compared")


def _run_region(child: Any, args: Any) -> Any:
    if not isinstance(child, GraphModule):
        raise ValueError(f"it calls a {type(child).__name__}; only regions (graph modules) are known here")
    placeholders = [node for node in child.graph.nodes if node.op == "placeholder"]
    for placeholder, value in zip(placeholders, args, strict=True):
        placeholder.meta["val"] = value
    result = None
    for node in child.graph.nodes:
        if node.op != "placeholder":
            result = infer(node)
    return result


def _attribute(node: Node) -> Any:
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _value(node: Node) -> Any:
    if "val" not in node.meta:
        raise ValueError(f"its argument {node.name} has no meta['val']")
    return node.meta["val"]


@contextmanager
def quiet() -> Generator[None]:
    """Without torch's own log of a refused call, a traceback that says less than the error raised here."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _mode_of(values: Iterable[Any]) -> FakeTensorMode | None:
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
        mode = _mode_of(cast("Iterable[Any]", value)) if isinstance(value, list | tuple) else None
        if mode is not None:
            return mode
    return None


def _failure(node: Node, error: Exception) -> str:
    arguments = ", ".join(f"{argument.name} {describe(argument.meta.get('val'))}" for argument in node.all_input_nodes)
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return f"cannot infer node {node.name} = {node.target}({arguments or 'no tensors'}): {reason}"


def describe(value: Any) -> str:
    """A value in a few characters: ``float32[2, 3]`` for a tensor, ``(..., ...)`` for several, else its text."""
    if isinstance(value, torch.Tensor):
        return f"{_name(value.dtype)}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"({', '.join(describe(item) for item in value)})"
    return "without a value" if value is None else repr(value)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
