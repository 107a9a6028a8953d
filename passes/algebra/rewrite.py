"""New nodes: with their values inferred, and the origin of what they replace."""

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import infer
from kimigraph.passes.algebra.frames import Operand
from kimigraph.passes.algebra.nodes import shape

ATEN = torch.ops.aten
ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack")


def call(
    graph: Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    like: Node,
    before: Node | None = None,
    after: Node | None = None,
    replaces: Iterable[Node] = (),
) -> Node:
    """A call_function node before or behind another, its value inferred, its origin taken from ``like``."""
    place = graph.inserting_before(before) if before is not None else graph.inserting_after(after)
    with place:
        node = graph.create_node("call_function", target, args, dict(kwargs or {}), name=_name(target))
    node.meta = {key: like.meta[key] for key in (*ORIGIN, "branch") if key in like.meta}
    replaced = tuple(dict.fromkeys(item.name for item in replaces))
    if replaced:
        node.meta["replaces"] = replaced
    infer(node)
    return node


def _name(target: Any) -> str | None:
    return target.overloadpacket.__name__ if isinstance(target, OpOverload) else None


def build(graph: Graph, operand: Operand, before: Node) -> Node:
    """The operand's node, viewed as the wanted shape if its own differs."""
    if shape(operand.node) == operand.shape:
        return operand.node
    return call(graph, ATEN.view.default, (operand.node, list(operand.shape)), like=operand.node, before=before)


def replace(old: Node, new: Node) -> None:
    """Hand all uses of ``old`` to ``new`` and infer what follows anew where the memory order differs.

    A ``view`` that the new strides do not allow becomes a ``reshape``.

    Why strides may differ: fused attention hands out [B, S, H, D] memory, and the graph was captured to its liking.
    """
    old.replace_all_uses_with(new, propagate_meta=False)
    waiting = sorted(new.users)
    while waiting:
        node = heappop(waiting)
        if node.op != "output" and _differs(node):
            for user in node.users:
                if user not in waiting:
                    heappush(waiting, user)


def _differs(node: Node) -> bool:
    before = node.meta.get("val")
    try:
        after = infer(node)
    except CompileError:
        if node.target is not ATEN.view.default:
            raise
        node.target = ATEN.reshape.default
        after = infer(node)
    return _form(before) != _form(after)


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    return tuple(_form(item) for item in value) if isinstance(value, list | tuple) else None
