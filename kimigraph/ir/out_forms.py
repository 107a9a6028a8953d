"""Operators of ATen in the form that writes into memory which is given: ``aten.mm.out`` for ``aten.mm``."""

from functools import cache

import torch
from torch._ops import OpOverload
from torch.fx import Node

from kimigraph.ir.dependences import starts_work
from kimigraph.ir.purity import mutated_arguments
from kimigraph.ir.schemas import argument

_ATEN = torch.ops.aten
COPIES = frozenset((_ATEN.clone.default, _ATEN._to_copy.default))
"""What copies, maybe into another dtype: ``copy_`` into the memory does the same."""


def writes_into_given_memory(node: Node) -> bool:
    """Whether the one result of the node can be written into memory of its size and strides, allocating nothing."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or mutated_arguments(node):
        return False
    if not starts_work(node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return node.target in COPIES or out_form(node) is not None


def out_form(node: Node) -> OpOverload | None:
    """The overload that takes the same arguments and ``out``; None where there is none, or one that allocates."""
    target = node.target
    if not isinstance(target, OpOverload) or (target is _ATEN.linear.default and _adds_bias_to_stack(node)):
        return None
    return _found(target)


def _adds_bias_to_stack(node: Node) -> bool:
    """``linear`` of more than two dimensions adds a bias inside the product, its ``out`` form after it."""
    rows = argument(node, "input")
    value = rows.meta.get("val") if isinstance(rows, Node) else None
    return argument(node, "bias") is not None and (not isinstance(value, torch.Tensor) or value.dim() != 2)


@cache
def _found(target: OpOverload) -> OpOverload | None:
    if target.namespace != "aten":
        return None
    packet = target.overloadpacket
    wanted = [(item.name, str(item.type)) for item in target._schema.arguments]
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        outs = [item for item in arguments if item.is_out]
        given = [(item.name, str(item.type)) for item in arguments if not item.is_out]
        # A generated one computes as usual and copies: memory and a launch more, not less.
        if len(outs) == 1 and given == wanted and torch.Tag.generated not in overload.tags:
            return overload
    return None
