"""Writes of rows into a cache, ``index_copy_`` and ``index_put_``: which cache, which rows, what they take."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kimigraph.ir.program import InputSpec
from kimigraph.passes.algebra.affine import Affine, affine
from kimigraph.passes.algebra.nodes import ATEN, argument, rank, shape
from kimigraph.passes.algebra.refusal import Refused

WRITES = (ATEN.index_copy_.default, ATEN.index_put_.default)


@dataclass(frozen=True)
class RowWrite:
    """``cache[b, positions[b, s]] = values[b, s]``; ``positions`` is [S] (the same for all) or broadcasts to [B, S].

    ``sizes`` are B, S and the columns of a row; ``values`` has them, dims of size 1 aside.
    """

    node: Node
    cache: Node
    spec: InputSpec
    positions: Node
    values: Node
    sizes: tuple[int, int, int]


def row_write(node: Node, spec: InputSpec) -> RowWrite:
    """The write of rows that ``node`` is, into the cache that ``spec`` describes. Refused when it is no such write."""
    cache = node.args[0]
    if not isinstance(cache, Node) or cache.op != "placeholder":
        raise Refused("the cache that is written is a view of an input", node)
    copies = node.target is ATEN.index_copy_.default
    found = _index_copy(node, cache, spec) if copies else _index_put(node, cache, spec)
    _require_distinct(found)
    return found


def _rows(cache: Node, node: Node) -> tuple[int, int, int]:
    """Sequences, capacity and columns of a cache [B, T, D] or [B, 1, T, D]."""
    sizes = shape(cache)
    if len(sizes) == 4 and sizes[1] == 1:
        sizes = (sizes[0], *sizes[2:])
    if len(sizes) != 3:
        raise Refused(f"the cache is {list(shape(cache))}, not [B, T, D]", node)
    return sizes


def _index_copy(node: Node, cache: Node, spec: InputSpec) -> RowWrite:
    batch, _, width = _rows(cache, node)
    positions, values = argument(node, "index"), argument(node, "source")
    if argument(node, "dim") % rank(cache) != rank(cache) - 2:
        raise Refused("the write does not run over the cache's rows", node)
    if not isinstance(positions, Node) or not isinstance(values, Node) or rank(positions) != 1:
        raise Refused("the write does not run over the cache's rows", node)
    return RowWrite(node, cache, spec, positions, values, (batch, shape(positions)[0], width))


def _index_put(node: Node, cache: Node, spec: InputSpec) -> RowWrite:
    batch, _, width = _rows(cache, node)
    indices: Any = argument(node, "indices")
    values = argument(node, "values")
    if rank(cache) != 3 or len(indices) != 2 or argument(node, "accumulate", False) or not isinstance(values, Node):
        raise Refused("the write does not run over the cache's rows", node)
    rows, columns = indices
    tokens = shape(values)[1] if rank(values) == 3 else 0
    if not tokens or shape(values) != (batch, tokens, width):
        raise Refused(f"what is written is {list(shape(values))}, not [B, S, D]", node)
    form = affine(rows, node)
    sequences = torch.arange(batch).view(batch, 1).expand(batch, tokens)
    if form.symbols or not torch.equal(_spread(form.known, (batch, tokens)), sequences):
        raise Refused("the write does not take row b of its values to sequence b", node)
    return RowWrite(node, cache, spec, columns, values, (batch, tokens, width))


def _spread(known: Tensor, sizes: tuple[int, int]) -> Tensor:
    try:
        return known.broadcast_to(sizes)
    except RuntimeError:
        return known


def _require_distinct(write: RowWrite) -> None:
    """Refuse positions that the graph does not show to differ from token to token."""
    _, tokens, _ = write.sizes
    if tokens == 1:
        return
    form: Affine = affine(write.positions, write.node)
    try:
        known = form.known.broadcast_to(shape(write.positions))
    except RuntimeError:
        known = form.known
    moving = any(_varies(symbol.elements) for symbol in form.symbols)
    steps = known[..., 1:] - known[..., :-1] if known.dim() else known
    if moving or known.dim() == 0 or known.shape[-1] != tokens or not bool((steps == 1).all()):
        raise Refused("the positions that are written do not count up from token to token", write.node)


def _varies(elements: Tensor) -> bool:
    """Whether a symbol reads another element for another token."""
    return elements.dim() > 0 and elements.shape[-1] > 1 and not bool((elements == elements[..., :1]).all())
