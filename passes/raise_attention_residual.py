"""``raise-attention-residual``: a softmax-weighted sum over stacked sources becomes ``attention_residual``.

Anchored at a softmax whose weights meet stacked tensors in a product; evidence: logits that are products with the
RMS-normalised sources, the sum of the same sources over them, and the RMS norm behind it where it is there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir import purity
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.frames import Operand, operand, require_type
from kimigraph.passes.algebra.match import Match
from kimigraph.passes.algebra.nodes import FLOATS, dtype, is_cast, is_view, packet, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.residual import Mixture, Stack, mixture_at, norm_behind, stack_of
from kimigraph.passes.algebra.residual_phases import choose_phases
from kimigraph.passes.algebra.rewrite import build, call, replace
from kimigraph.passes.algebra.rule import FusionPass, require_unused_elsewhere, require_unwritten
from kimigraph.passes.base import PassContext

ATEN = torch.ops.aten
MOST_SOURCES = 9
SOFTMAX = (ATEN.softmax.int, ATEN._softmax.default)


@dataclass(frozen=True)
class ResidualSite:
    """A checked residual: its operands, the node to replace, and the nodes that it stands for."""

    sources: tuple[Operand, ...]
    vectors: dict[str, Operand]
    eps: float
    out_eps: float | None
    out: Node
    like: Node
    replaces: tuple[Node, ...]


@dataclass(frozen=True)
class RaiseAttentionResidual(FusionPass):
    """Names attention residuals and takes the RMS norm behind them along.

    ``phases`` says whether sublayers that share finished blocks mix those together beforehand: ``one`` never, ``two``
    always, ``auto`` where the cost model finds it much faster. Refused: sources not stacked, logits of something
    else, values that are normalised, more than nine sources, weights or mixture used elsewhere.
    """

    phases: str = "auto"

    name: ClassVar[str] = "raise-attention-residual"
    summary: ClassVar[str] = "softmax over stacked block outputs, their mixture and the norm become one operator"
    fusion: ClassVar[bool] = True
    pattern: ClassVar[str] = (
        "a softmax over stacked tensors, of products of a learned vector with their RMS-normalised values, and the sum"
        " of the tensors weighted by it; the RMS norm that alone reads the sum"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "2 to 9 sources of one shape and type",
        "the query and the norms' weights are vectors as wide as the sources",
        "the values that are summed are not normalised",
        "weights, logits and sum are used for nothing else",
        "bfloat16, float16 or float32",
    )
    effect: ClassVar[str] = (
        "`attention_residual`; where sublayers share finished blocks and it pays, `attention_residual_history` once and"
        " `attention_residual_merge` for each"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Raise every site, then split those that share their finished blocks into two phases where it pays."""
        result = super().apply(program, context)
        if not result.modified:
            return result
        merges, notes = choose_phases(program.graph_module.graph, context, self.phases)
        if merges:
            purity.dead_code(program.graph_module.graph)
            program.graph_module.graph.lint()
            program.graph_module.recompile()
        remarks = [_renamed(remark, merges) for remark in result.remarks]
        return PassResult(True, (*remarks, *notes), {**result.statistics, "merges": len(merges)})

    def anchors(self, graph: Graph) -> Sequence[Node]:
        """Softmaxes whose weights meet stacked tensors."""
        return [node for node in graph.nodes if node.target in SOFTMAX and _is_site(node)]

    def check(self, program: CapturedProgram, anchor: Node) -> ResidualSite:
        """The residual around this softmax."""
        stack = stack_of(anchor)
        assert stack is not None
        try:
            mixture = mixture_at(anchor, stack)
        except Refused as refusal:
            raise refusal.raised_to(1, (stack.node,)) from refusal
        try:
            return _checked(program.graph_module.graph, anchor, stack, mixture)
        except Refused as refusal:
            raise refusal.raised_to(len(mixture.path), mixture.path) from refusal

    def rewrite(self, program: CapturedProgram, site: ResidualSite) -> Node:
        """Put the operator before the last node taken along."""
        graph = program.graph_module.graph
        built = {name: build(graph, found, site.out) for name, found in site.vectors.items()}
        node = call(
            graph,
            OPERATORS["attention_residual"].overload,
            (
                [build(graph, source, site.out) for source in site.sources],
                built["query"],
                built.get("norm_weight"),
                built.get("out_norm_weight"),
            ),
            {"eps": site.eps, "out_eps": 1e-5 if site.out_eps is None else site.out_eps},
            like=site.like,
            before=site.out,
            replaces=site.replaces,
        )
        result = node
        if shape(site.out) != shape(node):
            result = call(graph, ATEN.view.default, (node, list(shape(site.out))), like=node, before=site.out)
        replace(site.out, result)
        return node


def _renamed(remark: Remark, merges: Mapping[str, Node]) -> Remark:
    """A remark on a residual that became the second of two phases names that node."""
    node = merges.get(remark.node)
    if node is None:
        return remark
    message = remark.message.replace(f"became {remark.node}", f"became {node.name}")
    return replace_fields(remark, message=message, node=node.name, nodes=(*remark.nodes[:-1], node.name))


def _is_site(softmax: Node) -> bool:
    try:
        return stack_of(softmax) is not None
    except Refused:
        return False


def _checked(graph: Graph, softmax: Node, stack: Stack, mixture: Mixture) -> ResidualSite:
    if len(stack.parts) > MOST_SOURCES:
        raise Refused(
            f"{len(stack.parts)} sources are stacked, at most {MOST_SOURCES} are mixed in one pass", stack.node
        )
    sources = tuple(stack.source(number) for number in range(len(stack.parts)))
    returned = dtype(sources[0].node)
    for number, source in enumerate(sources):
        require_type(f"source {number}", source.node, FLOATS if number == 0 or returned is None else (returned,))
        require_contiguous(number, source)
    own = [node for node in mixture.path if node is not stack.node and _depends(node, stack.node)]
    require_unused_elsewhere([node for node in own if node is not mixture.core], own)
    last, norm = norm_behind(mixture.core, stack.width) or (mixture.core, Match())
    if last is not mixture.core and not _is_alone(mixture.core, last, norm):
        last, norm = mixture.core, Match()
    out = _output(last, returned)
    vectors = {
        name: operand(f"the {name.replace('_', ' ')}", match.leaf(name), "d", {"d": stack.width})
        for match in (mixture.logits, norm)
        for name in ("query", "norm_weight", "out_norm_weight")
        if name in match.leaves
    }
    for name, found in vectors.items():
        require_type(f"the {name.replace('_', ' ')}", found.node, FLOATS)
    for name, found in {**vectors, **{f"source {number}": item for number, item in enumerate(sources)}}.items():
        require_unwritten(graph, name, found, out)
    named = [stack.node, *(node for node in own if packet(node) in ("rsqrt", "sum", "softmax", "_softmax"))]
    named += [node for node in norm.path if packet(node) == "rsqrt"]
    replaces = tuple(dict.fromkeys([*named, mixture.core]))
    return ResidualSite(
        sources, vectors, mixture.logits.numbers["eps"], norm.numbers.get("out_eps"), out, softmax, replaces
    )


def require_contiguous(number: int, source: Operand) -> None:
    """Refuse a source whose tokens do not lie one after the other, each with its channels side by side."""
    value = source.node.meta["val"]
    if not value.is_contiguous():
        raise Refused(f"source {number} has layout {list(value.stride())}, wanted a contiguous tensor", source.node)


def _depends(node: Node, on: Node) -> bool:
    """Whether a node of a match lies above the stack: what only prepares the query does not."""
    waiting, seen = [node], {node}
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source is on:
                return True
            if source not in seen and on < source:
                seen.add(source)
                waiting.append(source)
    return False


def _is_alone(core: Node, last: Node, norm: Match) -> bool:
    """Whether the norm that ends in ``last`` alone reads the mixture."""
    inside = {*norm.path, *(node for leaf in norm.leaves["mixed"] for node in leaf.chain)}
    return all(user in inside for node in (core, *inside) if node is not last for user in node.users)


def _output(node: Node, returned: torch.dtype | None) -> Node:
    """The node whose uses the operator takes: ``node``, or the cast of it to the type that the operator returns."""
    while dtype(node) != returned:
        users = list(node.users)
        if len(users) != 1 or not (is_cast(users[0]) or is_view(users[0])):
            raise Refused(f"the result is used as {dtype(node)}, attention_residual returns {returned}", node)
        node = users[0]
    return node
