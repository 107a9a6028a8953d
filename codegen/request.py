"""From a semantic node of the graph to what a kernel template is asked for."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import map_arg

from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.ir.errors import CompileError
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.operators.registry import NAMESPACE, Cost
from kimigraph.ir.own_rows import OWN_ROWS
from kimigraph.ir.schemas import bind


def semantic_operator(node: Node) -> str | None:
    """The bare name of the ``kimigraph::`` operator that the node calls, or None; a view of rows is none."""
    if node.op != "call_function" or node.target is OWN_ROWS:
        return None
    if isinstance(node.target, OpOverload) and node.target.namespace == NAMESPACE:
        return node.target.name().partition("::")[2].partition(".")[0]
    return None


def tensor_arguments(node: Node) -> dict[str, Node | list[Node] | None]:
    """The operator's tensor arguments by name in schema order, None where absent: what ``launch`` takes.

    An argument that is a list of tensors is a list of nodes.
    """
    return {name: value for name, kind, value in _bind(node) if kind == "tensor"}


def kernel_request(node: Node, target: str = "cpu") -> KernelRequest:
    """The request for one call on ``target``, with what ``meta["val"]`` records and schema defaults filled in."""
    tensors: dict[str, TensorSpec | None] = {}
    attributes: dict[str, Any] = {}
    for name, kind, value in _bind(node):
        if kind == "tensor" and isinstance(value, list | tuple):
            items = list(cast("Sequence[Any]", value))
            tensors |= {f"{name}_{number}": _specification(item, node, name) for number, item in enumerate(items)}
        elif kind == "tensor":
            tensors[name] = None if value is None else _specification(value, node, name)
        else:
            attributes[name] = value
    op = semantic_operator(node)
    assert op is not None
    return KernelRequest(op, tensors, attributes, target)


def call_cost(node: Node) -> Cost:
    """Bytes and FLOPs of the call by the operator's own count."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return OPERATORS[semantic_operator(node) or ""].cost(*args, **kwargs)


def _bind(node: Node) -> list[tuple[str, str, Any]]:
    """(name, "tensor" or "attribute", value) for every schema argument."""
    assert isinstance(node.target, OpOverload)
    kinds = {a.name: "tensor" if "Tensor" in str(a.type) else "attribute" for a in node.target._schema.arguments}
    return [(name, kinds[name], value) for name, value in bind(node).items()]


def _specification(value: Any, node: Node, name: str) -> TensorSpec:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    if not isinstance(tensor, torch.Tensor):
        raise CompileError(f"node {node.name}: argument {name} has no recorded shape, so no kernel can be made for it")
    sizes = (*tensor.shape, *tensor.stride())
    if any(isinstance(size, torch.SymInt) for size in sizes):
        raise CompileError(f"node {node.name}: argument {name} has a symbolic shape; kernels need static shapes")
    aligned = int(tensor.storage_offset()) * tensor.element_size() % 16 == 0
    return TensorSpec(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."), aligned)
