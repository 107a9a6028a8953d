"""The attention that torch.onnx writes out, as ``scaled_dot_product_attention`` again.

Both factors are multiplied by the root of the scale, a mask of truths becomes zeros and the lowest number that are
added, and NaN after the softmax becomes zero. In files of other producers these steps stay what they are.
"""

from typing import Any

import torch
from torch.fx import Node

from kimigraph.capture.onnx.builder import ATEN, Value
from kimigraph.capture.onnx.call import Call
from kimigraph.capture.onnx.numbers import shortest

LOWEST = torch.finfo(torch.float32).min


def attention(c: Call, probabilities: Value, values: Value) -> Value | None:
    """The product of softmax and values as one call; None where it is anything else."""
    softmax, guarded = _softmax(probabilities.node)
    if softmax is None or not c.from_torch or probabilities.rank < 3 or values.rank != probabilities.rank:
        return None
    scores, mask = _masked(softmax.args[0])
    factors = _factors(scores)
    if factors is None or (mask is not None and not guarded):
        return None
    query, key, scale = factors
    if query.shape[:-2] != values.shape[:-2]:
        return None
    return c.build.call(
        ATEN.scaled_dot_product_attention.default, query, key, values, mask, 0.0, False, scale=shortest(scale)
    )


def _called(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.target in targets


def _value(node: Any) -> Value:
    return Value(node.meta["val"], node)


def _softmax(node: Any) -> tuple[Node | None, bool]:
    """The softmax over the last axis below a guard against NaN, and whether there is one."""
    guarded = False
    if _called(node, ATEN.masked_fill.Scalar) and node.args[2] == 0 and _called(node.args[1], ATEN.isnan.default):
        guarded = node.args[1].args[0] is node.args[0]
        node = node.args[0]
    if not _called(node, ATEN.softmax.int) or node.args[1] != node.meta["val"].dim() - 1:
        return None, False
    return node, guarded


def _masked(scores: Any) -> tuple[Any, Value | None]:
    """The scores before a mask was added, and the mask: of truths, or as it was added."""
    if not _called(scores, ATEN.add.Tensor) or not all(isinstance(item, Node) for item in scores.args[:2]):
        return scores, None
    product, added = scores.args[:2]
    if not _called(product, ATEN.matmul.default):
        return scores, None
    if _called(added, ATEN.where.self) and _fill(added.args[1]) == 0 and (_fill(added.args[2]) or 0) <= LOWEST:
        return product, _value(added.args[0])
    return product, _value(added)


def _fill(node: Any) -> float | None:
    """The number that a constant is throughout."""
    if _called(node, ATEN.full.default):
        return float(node.args[1])
    value = node.meta.get("constant") if isinstance(node, Node) else None
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else None


def _factors(product: Any) -> tuple[Value, Value, float] | None:
    """Query and key [.., S, D] of scores, and the scale of their product."""
    if not _called(product, ATEN.matmul.default):
        return None
    scale, sides = 1.0, list[Any]()
    for side in product.args[:2]:
        if not _called(side, ATEN.mul.Tensor) or not isinstance(side.args[1], float):
            return None
        scale *= side.args[1]
        sides.append(side.args[0])
    query, turned = sides
    last = query.meta["val"].dim() - 1
    if not _called(turned, ATEN.transpose.int) or set(turned.args[1:3]) != {last - 1, last}:
        return None
    return _value(query), _value(turned.args[0]), scale
