"""Queries of an indexer in pieces, for the passes that share them out among ranks."""

from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.remarks import Remark
from kimigraph.passes.algebra.nodes import argument, shape
from kimigraph.passes.algebra.rewrite import replace
from kimigraph.passes.sharding.stretches import Stretches

ATEN = torch.ops.aten


def refusal(indexer: Node) -> str:
    """Why pieces of its queries cannot be scored by themselves; empty where they can."""
    if argument(indexer, "lengths") is None or argument(indexer, "mask") is not None:
        return "what its queries see is not told by a length"
    return "its queries are bytes" if argument(indexer, "q_scales") is not None else ""


def remark(kind: Any, name: str, indexer: Node, message: str) -> Remark:
    """What the pass of that name says of an indexer."""
    told, place = f"{indexer.name}: {message}", module_path(indexer)
    return Remark(kind, name, told, indexer.name, source_line(indexer), (indexer.name,), module=place)


def rank_numbers(ranks: Stretches, indexer: Node) -> Node:
    """The numbers of all ranks, int64 [W]."""
    return ranks.make(ATEN.arange.default, ranks.ways, dtype=torch.int64, device=indexer.meta["val"].device)


def cut(ranks: Stretches, value: Node, count: int, which: Node) -> Node:
    """Of ``count`` pieces of [B, S, ...] those whose numbers ``which`` [N] lists: [N, B, S / count, ...]."""
    batch, tokens, *rest = shape(value)
    parts = ranks.make(ATEN.reshape.default, value, [batch, count, tokens // count, *rest])
    turned = ranks.make(ATEN.permute.default, parts, [1, 0, *range(2, len(rest) + 3)])
    return ranks.make(ATEN.index_select.default, turned, 0, which)


def scored(ranks: Stretches, indexer: Node, q: Node, weights: Node, lengths: Node) -> Node:
    """The indexer over a piece of the queries, the first of which sees ``lengths`` keys."""
    rest = {name: value for name, value in indexer.kwargs.items() if name not in ("lengths", "mask")}
    piece = ranks.make(indexer.target, q, argument(indexer, "keys"), weights, lengths, None, **rest)
    piece.meta["replaces"] = (indexer.name,)
    return piece


def put_back(ranks: Stretches, indexer: Node, pieces: Node) -> None:
    """Let the picks of all pieces [N, B, S / N, k], in their order, take the place of the indexer."""
    turned = ranks.make(ATEN.permute.default, pieces, [1, 0, 2, 3])
    replace(indexer, ranks.make(ATEN.reshape.default, turned, list(shape(indexer))))
    indexer.graph.erase_node(indexer)
