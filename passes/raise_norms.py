"""``raise-norms``: an RMS norm that is written out becomes ``rms_norm``, with the residual sum that it alone reads.

Anchored at a reciprocal root; evidence: a mean of squares plus a constant below it, the product with what was squared
above it, then weight and rounding in either order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir import purity
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes.algebra.nodes import FLOATS, argument, dtype, is_cast, packet, rank, shape, widens
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import call, replace
from kimigraph.passes.algebra.rule import FusionPass

ATEN = torch.ops.aten


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


@dataclass(frozen=True)
class RaiseNorms(FusionPass):
    """Names RMS norms over the last dim, for ``fuse-pointwise`` and for people who read the graph.

    Refused: intermediate values that are used elsewhere, operands that are written before the norm is done, results
    that are not rounded to the type of what is normed.
    """

    name: ClassVar[str] = "raise-norms"
    summary: ClassVar[str] = "a written-out RMS norm becomes rms_norm"
    fusion: ClassVar[bool] = True
    pattern: ClassVar[str] = (
        "a tensor times the `rsqrt` of the mean of its squares over the last dim plus a constant, then a weight and a "
        "cast in either order; before it a sum that nothing else reads"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "arithmetic in float32, the result in the type of the operand",
        "the weight is a vector as wide as the norm, or absent",
        "the intermediate values are used nowhere else",
        "no operand is written between its use and the result",
        "bfloat16, float16 or float32",
    )
    effect: ClassVar[str] = "`rms_norm`, with the residual where the sum was for the norm alone"

    def anchors(self, graph: Graph) -> Sequence[Node]:
        """The reciprocal roots of means."""
        return [node for node in graph.nodes if node.target is ATEN.rsqrt.default and _mean_below(node) is not None]

    def check(self, program: CapturedProgram, anchor: Node) -> Norm:
        """The norm around this root."""
        below = _mean_below(anchor)
        assert below is not None
        wide, eps, path = below
        product = next((user for user in anchor.users if _is_product(user, wide, anchor)), None)
        if product is None:
            raise Refused("the root does not scale what was squared", anchor)
        path = (*path, anchor, product)
        try:
            norm = _finished(wide, eps, path)
            _require_inside(program.graph_module.graph, norm)
        except Refused as refusal:
            raise refusal.raised_to(len(path), path) from refusal
        return norm

    def rewrite(self, program: CapturedProgram, site: Norm) -> Node:
        """Put the operator before the last node of the norm."""
        node = call(
            program.graph_module.graph,
            OPERATORS["rms_norm"].overload,
            (site.x, site.weight, site.residual),
            {"eps": site.eps, "rounds_first": site.rounds_first},
            like=site.out,
            before=site.out,
            replaces=site.path,
        )
        replace(site.out, node)
        return node


def _mean_below(root: Node) -> tuple[Node, float, tuple[Node, ...]] | None:
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


def _finished(wide: Node, eps: float, path: tuple[Node, ...]) -> Norm:
    """The norm with what follows its product: weight, then cast; cast, then weight; or one of them alone."""
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


def _require_inside(graph: Graph, norm: Norm) -> None:
    """Refuse when what vanishes is used outside, or an operand is written before the norm's place."""
    gone = {node for node in norm.path if not (is_cast(node) and node is norm.path[0])}
    for node in norm.path[:-1]:
        for user in node.users:
            if node in gone and user not in norm.path and packet(user) != "_assert_tensor_metadata":
                raise Refused(f"the intermediate {node.name} is used elsewhere, by {user.name}", node)
    for what in (norm.x, norm.weight, norm.residual):
        if what is None:
            continue
        for reader in sorted(_readers(what, norm.path))[:1]:
            writer = purity.mutation_between(graph, what, reader, norm.out)
            if writer is not None:
                raise Refused(f"the operand {what.name} is written between its use and {norm.out.name}", writer)


def _readers(operand: Node, path: Sequence[Node]) -> list[Node]:
    """What of the norm reads an operand before its last node: others that vanish, and casts, which it does itself."""
    inside = set(path)
    casts = [user for user in operand.users if is_cast(user) and any(reader in inside for reader in user.users)]
    return [user for user in (*casts, *(user for user in operand.users if user in inside)) if user is not path[-1]]
