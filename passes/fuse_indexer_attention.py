"""``fuse-indexer-attention``: an indexer and its attentions share one buffer of indices, and one address translation.

Anchored at ``sparse_attention``; evidence: its indices are an indexer's picks, through casts at most, and both read
pages by one block table. Then the indexer, which has the page at hand, lists rows, which attention reads as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes.algebra.frames import Operand
from kimigraph.passes.algebra.nodes import argument, is_cast, packet, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import call, replace
from kimigraph.passes.algebra.rule import FusionPass, require_unwritten


@dataclass(frozen=True)
class PairSite:
    """An indexer and the attentions, one or of several layers, that read its picks."""

    indexer: Node
    attentions: tuple[Node, ...]
    rows: bool


@dataclass(frozen=True)
class FuseIndexerAttention(FusionPass):
    """Lets sparse attention read what its indexer wrote, without casts and without a second walk of the block table.

    Refused: picks that something else computes with (key pooling expands them, and that stays ATen), picks that are
    also used as positions, caches of indexer and attention with different block tables or page sizes.
    """

    name: ClassVar[str] = "fuse-indexer-attention"
    summary: ClassVar[str] = "an indexer lists rows of the cache, and its attentions read them without a block table"
    fusion: ClassVar[bool] = True
    pattern: ClassVar[str] = "`sparse_attention` whose indices are a `lightning_indexer`'s, through casts at most"
    constraints: ClassVar[tuple[str, ...]] = (
        "one block table and one page size for the index keys and the latents of all attentions that share the picks",
        "the picks are used by attentions only; contiguous caches need no rows, only one buffer",
        "picks that are expanded from pools of keys stay as they are",
    )
    effect: ClassVar[str] = "`lightning_indexer` that lists rows, `sparse_attention` that reads rows"

    def anchors(self, graph: Graph) -> Sequence[Node]:
        """The attentions."""
        return [node for node in graph.nodes if node.target is OPERATORS["sparse_attention"].overload]

    def check(self, program: CapturedProgram, anchor: Node) -> PairSite:
        """The pair to which this attention belongs; the last attention of a shared list stands for all of them."""
        indexer = _indexer(anchor)
        try:
            attentions = _attentions(indexer)
            site = _checked(program.graph_module.graph, indexer, attentions)
        except Refused as refusal:
            raise refusal.raised_to(1, (indexer,)) from refusal
        if anchor is not attentions[0]:
            raise Refused("another attention stands for those that share its list", anchor)
        if not site.rows and all(argument(one, "indices") is indexer for one in attentions):
            raise Refused("indexer and attention share one buffer already", anchor)
        return site

    def rewrite(self, program: CapturedProgram, site: PairSite) -> Node:
        """Make the indexer list rows (where there are pages) and hand its result to every attention."""
        graph, indexer = program.graph_module.graph, site.indexer
        if site.rows:
            kwargs = {**indexer.kwargs, "rows": True}
            new = call(graph, indexer.target, indexer.args, kwargs, like=indexer, before=indexer, replaces=[indexer])
            new.meta.update({key: indexer.meta[key] for key in ("selects",) if key in indexer.meta})
            replace(indexer, new)
            graph.erase_node(indexer)
            indexer = new
        last: Node = indexer
        for one in site.attentions:
            kwargs = {**one.kwargs, **({"block_table": None, "rows": True} if site.rows else {})}
            args = (*one.args[:4], indexer, *one.args[5:])
            last = call(graph, one.target, args, kwargs, like=one, before=one, replaces=[one])
            replace(one, last)
            graph.erase_node(one)
        last.meta["replaces"] = (site.indexer.name, *(one.name for one in site.attentions))
        return last


def _indexer(attention: Node) -> Node:
    """The indexer whose picks an attention reads. Refused with what stands in between."""
    node = argument(attention, "indices")
    while isinstance(node, Node) and (is_cast(node) or packet(node) in ("clone", "contiguous", "alias", "detach")):
        node = node.args[0]
    if not isinstance(node, Node):
        raise Refused("the list is no indexer's", attention)
    if node.target is OPERATORS["lightning_indexer"].overload:
        return node
    below = _indexer_below(node)
    if below is not None:
        raise Refused("the picks are expanded from pools of keys, which stays ATen", node, 1, (below,))
    raise Refused("the list is no indexer's", attention)


def _indexer_below(node: Node) -> Node | None:
    seen, waiting = {node}, [node]
    while waiting:
        one = waiting.pop()
        if one.target is OPERATORS["lightning_indexer"].overload:
            return one
        if one.target is OPERATORS["sparse_attention"].overload:
            continue
        for source in one.all_input_nodes:
            value = source.meta.get("val")
            if source not in seen and isinstance(value, torch.Tensor) and not value.dtype.is_floating_point:
                seen.add(source)
                waiting.append(source)
    return None


def _attentions(indexer: Node) -> tuple[Node, ...]:
    """All attentions that read the picks, in graph order. Refused when something else uses them."""
    found: list[Node] = []
    waiting: list[Node] = [indexer]
    for node in waiting:
        for user in node.users:
            if user.target is OPERATORS["sparse_attention"].overload and argument(user, "indices") is node:
                found.append(user)
            elif is_cast(user) or packet(user) in ("clone", "contiguous", "alias", "detach"):
                waiting.append(user)
            else:
                raise Refused(f"the picks are also used as positions, by {user.name}", user)
    return tuple(sorted(found))


def _checked(graph: Graph, indexer: Node, attentions: tuple[Node, ...]) -> PairSite:
    table, keys = argument(indexer, "block_table"), argument(indexer, "keys")
    for one in attentions:
        latent = argument(one, "latent")
        if argument(one, "rows") or argument(indexer, "rows"):
            raise Refused("indexer and attention share one buffer already", one)
        if argument(one, "block_table") is not table:
            raise Refused("indexer and attention find their pages by different block tables", one)
        if table is None:
            continue
        if shape(latent)[1] != shape(keys)[1]:
            raise Refused(f"pages hold {shape(keys)[1]} index keys and {shape(latent)[1]} latent rows", one)
        if shape(latent)[0] * shape(latent)[1] >= 1 << 31:
            raise Refused("the cache has more rows than an int32 counts", one)
        require_unwritten(graph, "the block table", Operand(table, (), indexer), one)
    return PairSite(indexer, attentions, table is not None)
