"""RMS norms as models write them out: a tensor times the root of the mean of its squares, weight and rounding."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from kimigraph.passes.algebra.nodes import ATEN, FLOATS, argument, dtype, is_cast, packet, rank, shape, widens
from kimigraph.passes.algebra.refusal import Refused


@dataclass(frozen=True)
class Norm:
    """A checked norm: its operands, the nodes that vanish, and the last of them, which the operator replaces."""

    x: Node
    weight: Node | None
    residual: Node | None
    eps: float
    rounds_first: bool
    path: tuple[Node, ...]
    out: Node


def mean_below(root: Node) -> tuple[Node, float, tuple[Node, ...]] | None:
    """What was squared, the constant and the nodes between, of ``rsqrt(mean(x^2, -1) + eps)``."""
    total = root.args[0]
    if packet(total) != "add" or not isinstance(total, Node):
        return None
    mean, eps = total.args[0], total.args[1]
    if packet(mean) != "mean" or not isinstance(mean, Node) or not isinstance(eps, int | float):
        return None
    square = mean.args[0]
    if not isinstance(square, Node) or not _is_over_last(mean, square) or argument(total, "alpha", 1) != 1:
        return None
    wide = _squared(square)
    return None if wide is None else (wide, float(eps), (square, mean, total))


def _is_over_last(mean: Node, square: Node) -> bool:
    dims: Any = argument(mean, "dim")
    return list(dims or ()) in ([-1], [rank(square) - 1]) and bool(argument(mean, "keepdim"))


def _squared(node: Node) -> Node | None:
    base = node.args[0] if node.args else None
    if not isinstance(base, Node) or dtype(base) is not torch.float32:
        return None
    power = packet(node) == "pow" and node.args[1] == 2
    product = packet(node) == "mul" and node.args[1] is base
    return base if power or product or packet(node) == "square" else None


def _is_product(user: Node, left: Node, right: Node) -> bool:
    return packet(user) == "mul" and set(user.args[:2]) == {left, right}


def norm_path(root: Node) -> tuple[Node, float, tuple[Node, ...]]:
    """What was squared, the constant, and the nodes up to the product with the root. Refused where there is none."""
    below = mean_below(root)
    if below is None:
        raise Refused("the root is not that of a mean of squares", root)
    wide, eps, path = below
    product = next((user for user in root.users if _is_product(user, wide, root)), None)
    if product is None:
        raise Refused("the root does not scale what was squared", root)
    return wide, eps, (*path, root, product)


def norm_around(root: Node) -> Norm:
    """The norm around a reciprocal root. Refused where there is none, or one of another type."""
    return finished_norm(*norm_path(root))


def finished_norm(wide: Node, eps: float, path: tuple[Node, ...]) -> Norm:
    """What ``norm_path`` gave, with what follows the product: weight, then cast; cast, then weight; or one of them.

    Refused where the type is another one.
    """
    source = wide.args[0] if is_cast(wide) and widens(wide) else wide
    assert isinstance(source, Node)
    kind, product = dtype(source), path[-1]
    if kind not in FLOATS:
        raise Refused(
            f"the normed tensor is {str(kind).removeprefix('torch.')}, wanted bfloat16, float16 or float32", wide
        )
    out, rounds_first = product, False
    if kind is not torch.float32:
        cast = _only(out, lambda user: is_cast(user) and dtype(user) is kind)
        rounds_first = cast is not None
        out, path = (cast, (*path, cast)) if cast is not None else (out, path)
    weight, scaled = _weighted(out)
    if scaled is not None:
        out, path = scaled, (*path, scaled)
    if dtype(out) is not kind:
        cast = _only(out, lambda user: is_cast(user) and dtype(user) is kind)
        if cast is None:
            raise Refused("the norm is not rounded to the type of its operand", out)
        out, path = cast, (*path, cast)
    x, residual = _summed(source, wide)
    before = (*((wide,) if wide is not source else ()), *((source,) if residual is not None else ()))
    return Norm(x, weight, residual, eps, rounds_first and weight is not None, (*before, *path), out)


def _only(node: Node, wanted: Any) -> Node | None:
    """The one user of a node, if it is wanted."""
    users = list(node.users)
    return users[0] if len(users) == 1 and wanted(users[0]) else None


def _weighted(node: Node) -> tuple[Node | None, Node | None]:
    """The vector that scales the norm, without a widening cast, and the product."""
    product = _only(node, lambda user: packet(user) == "mul")
    if product is None:
        return None, None
    left, right = product.args[:2]
    other = right if left is node else left
    if not isinstance(other, Node) or other is node or shape(other) != shape(node)[-1:]:
        return None, None
    source = other.args[0] if is_cast(other) and widens(other) else other
    assert isinstance(source, Node)
    return (source, product) if dtype(source) in FLOATS and dtype(product) is dtype(node) else (None, None)


def _summed(source: Node, wide: Node) -> tuple[Node, Node | None]:
    """The two operands of a sum that only this norm reads."""
    a, b = (source.args[0], source.args[1]) if packet(source) == "add" and len(source.args) > 1 else (None, None)
    alone = wide is not source and list(source.users) == [wide]
    if not alone or not isinstance(a, Node) or not isinstance(b, Node) or argument(source, "alpha", 1) != 1:
        return source, None
    alike = shape(a) == shape(b) == shape(source) and dtype(a) is dtype(b) is dtype(source)
    return (a, b) if alike and source.target is ATEN.add.Tensor else (source, None)
