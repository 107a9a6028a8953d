"""``fuse-rms-norm``: ``x * rsqrt(mean(x * x) + eps)`` over the last axis becomes one ``aten.rms_norm``.

A worked example of a pass outside kimigraph. Read ``apply`` first: find, check, rewrite, remark.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir.fake import infer
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import source_line
from kimigraph.ir.purity import dead_code, mutation_between
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes import Pass, PassContext

ATEN = torch.ops.aten
_ORIGIN = ("stack_trace", "nn_module_stack")


@dataclass(frozen=True)
class Norm:
    """A place that looks like a norm: ``product = x * root``, where ``chain`` leads from the square to the root."""

    product: Node
    x: Node
    chain: tuple[Node, ...]
    eps: float


@dataclass(frozen=True)
class FuseRmsNorm(Pass):
    """One operator for a written-out RMS norm. The weight stays a product of its own behind it.

    Options: ``min_width``, the narrowest last axis worth an operator. Run it after ``raise-kda``, which looks for the
    written-out norms of KDA itself.
    """

    name: ClassVar[str] = "fuse-rms-norm"
    summary: ClassVar[str] = "x * rsqrt(mean(x^2) + eps) becomes one rms_norm"
    fusion: ClassVar[bool] = True
    pattern: ClassVar[str] = "a tensor times the `rsqrt` of the mean of its squares over the last axis, plus a constant"
    constraints: ClassVar[tuple[str, ...]] = ("float32, contiguous", "the intermediates are used nowhere else")
    effect: ClassVar[str] = "`aten.rms_norm` without weight"

    min_width: int = 1

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        graph = program.graph_module.graph
        remarks: list[Remark] = []
        for node in list(graph.nodes):
            norm = find(node)
            if norm is None:
                continue
            fault = self.check(graph, norm)
            if fault is not None:
                remarks.append(self._missed(norm, *fault))
            elif context.allow(f"the norm at {node.name}"):
                remarks.append(self._passed(norm, rewrite(graph, norm)))
        fused = sum(remark.kind == "passed" for remark in remarks)
        erased = dead_code(graph) if fused else 0
        return PassResult(fused > 0, tuple(remarks), {"fused": fused, "erased": erased})

    def check(self, graph: Graph, norm: Norm) -> tuple[Node, str] | None:
        """The node at fault and the reason, or None. Nothing is changed here."""
        value = norm.x.meta["val"]
        if value.dtype != torch.float32:
            return norm.x, f"{norm.x.name} is {value.dtype}, where the operator rounds in other places"
        if not value.is_contiguous():
            return norm.x, f"{norm.x.name} is not contiguous, so the result would be laid out in another way"
        if value.shape[-1] < self.min_width:
            return norm.x, f"the last axis has {value.shape[-1]} elements, fewer than min-width={self.min_width}"
        for node, reader in zip(norm.chain, (*norm.chain[1:], norm.product), strict=True):
            for user in node.users:
                if user is not reader:
                    return node, f"the intermediate {node.name} is used elsewhere, by {user.name}"
        writer = mutation_between(graph, norm.x, norm.chain[0], norm.product)
        if writer is not None:
            return writer, f"{norm.x.name} is written between its square and the product"
        return None

    def _passed(self, norm: Norm, node: Node) -> Remark:
        names = (*node.meta["replaces"], node.name)
        return Remark(
            "passed", self.name, f"{norm.product.name} became {node.name}", node.name, source_line(node), names
        )

    def _missed(self, norm: Norm, node: Node, reason: str) -> Remark:
        matched = tuple(f"{found.name} ({found.target})" for found in norm.chain)
        return Remark(
            "missed", self.name, reason, node.name, source_line(norm.product), score=len(matched), matched=matched
        )


def find(product: Node) -> Norm | None:
    """The norm that ends in ``product``, its operands in either order; None where nothing looks like one."""
    if product.target is not ATEN.mul.Tensor:
        return None
    for x, root in (product.args, product.args[::-1]):
        total = _operand(root, ATEN.rsqrt.default)
        mean = _operand(total, ATEN.add.Tensor)
        square = _operand(mean, ATEN.mean.dim)
        if square is None or not isinstance(x, Node) or not _is_square(square, x):
            continue
        assert isinstance(root, Node) and total is not None and mean is not None
        if _is_last_axis(mean, x) and len(total.args) == 2 and isinstance(total.args[1], float) and not total.kwargs:
            return Norm(product, x, (square, mean, total, root), total.args[1])
    return None


def _operand(node: Any, target: Any) -> Node | None:
    """The first argument of ``node`` if it calls ``target``."""
    if not isinstance(node, Node) or node.target is not target or not isinstance(node.args[0], Node):
        return None
    return node.args[0]


def _is_square(node: Node, x: Node) -> bool:
    if node.target is ATEN.square.default:
        return node.args == (x,)
    if node.target is ATEN.pow.Tensor_Scalar:
        return node.args == (x, 2)
    return node.target is ATEN.mul.Tensor and node.args == (x, x)


def _is_last_axis(mean: Node, x: Node) -> bool:
    last = x.meta["val"].dim() - 1
    return list(mean.args[1:]) in ([[-1], True], [[last], True]) and not mean.kwargs


def rewrite(graph: Graph, norm: Norm) -> Node:
    """Put the operator before the product and hand over its users."""
    with graph.inserting_before(norm.product):
        node = graph.call_function(ATEN.rms_norm.default, (norm.x, [norm.x.meta["val"].shape[-1]], None, norm.eps))
    node.meta = {key: norm.product.meta[key] for key in _ORIGIN if key in norm.product.meta}
    node.meta["replaces"] = tuple(found.name for found in (*norm.chain, norm.product))
    infer(node)
    norm.product.replace_all_uses_with(node, propagate_meta=False)
    return node
