"""``prune-index-exchange``: ranks share out the tokens of latent and index caches, and exchange what few can win.

Each rank scores the keys that it has and picks its first k. Under a strict order the first k of all are among these;
ranks exchange the few that neither win nor lose for sure (``exchange_picks``), each attends over the picked rows that
it has, and the parts, weighted by what each had of the softmax, are summed up where the fewest bytes cross.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.fx import Node

from kimigraph.ir import purity
from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import infer
from kimigraph.ir.mesh import SP_GROUP
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.reference.index_exchange import bytes_a_row
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.nodes import argument, described, is_cast, packet, shape
from kimigraph.passes.algebra.rewrite import call
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.sharding.cache_shares import CacheShares
from kimigraph.passes.sharding.merged_attention import merge_attention
from kimigraph.passes.sharding.sequence import Places, rows_of_limits
from kimigraph.passes.share_tokens import STRETCH

ATEN = torch.ops.aten
INDEXER, ATTENTION = OPERATORS["lightning_indexer"].overload, OPERATORS["sparse_attention"].overload
SCORES, EXCHANGE = OPERATORS["index_scores"].overload, OPERATORS["exchange_picks"].overload
SCORED_BY = ("scale", "q_scales", "quantises_q", "block_table", "descriptor")
"""What scores depend on beside queries, keys and weights."""


@dataclass(frozen=True)
class PruneIndexExchange(Pass):
    """Shares out the caches of a program among the ``sp`` ranks of the compilation; with one it does nothing.

    Candidates are pruned where limits and histogram take fewer bytes than they save, or ``always``.

    CompileError for a cache that anything but its operators touches, UsageError for one of which ranks cannot have
    equal shares.
    """

    always: bool = False

    name: ClassVar[str] = "prune-index-exchange"
    summary: ClassVar[str] = "sp ranks share out the tokens of caches and exchange the candidates that can win"
    changes_formats: ClassVar[bool] = True
    pattern: ClassVar[str] = (
        "caches of latents and index keys with `latent_write`, `index_key_write`, `lightning_indexer` and "
        "`sparse_attention`"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "`--sp` is more than 1 and divides the context",
        "nothing but these operators touches the caches, and an attention reads an indexer's own list",
        "what a query sees is a length, not a mask; there is no sink",
    )
    effect: ClassVar[str] = (
        "caches of a rank's tokens, writes at its places, the indexer over its keys, `index_scores` and "
        "`exchange_picks`, attention over its rows, an `all_gather` of LSE and an `all_reduce` of weighted parts"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Share out all caches, then what reads and writes them."""
        ways = context.config.sp
        if ways == 1:
            return PassResult(False)
        work = _Work(program, CacheShares(program, ways, context.config.tp), self.always)
        work.run()
        graph = program.graph_module.graph
        purity.dead_code(graph)
        graph.lint()
        program.graph_module.recompile()
        mesh: dict[str, int] = program.info.get("mesh", {})
        program.info["mesh"] = {"sp": ways, **mesh}
        return _result(self.name, work)


@dataclass
class _Work:
    """One run over one program."""

    program: CapturedProgram
    caches: CacheShares
    always: bool
    exchanges: list[tuple[Node, str]] = field(default_factory=lambda: [])
    merged: list[Node] = field(default_factory=lambda: [])
    gathered: list[Node] = field(default_factory=lambda: [])
    """Caches put together for queries of a stretch."""
    _tables: dict[Node, Any] = field(default_factory=lambda: {})
    _places: dict[int, Places] = field(default_factory=lambda: {})
    _own: dict[Node, Node] = field(default_factory=lambda: {})
    """The places of an indexer's picks on a rank."""

    def run(self) -> None:
        """Rewrite everything; CompileError, before anything is changed, for what cannot be."""
        _require(self.program, self.caches.ways)
        users = self.caches.take()
        for node, cache in users:
            if node.meta.get(STRETCH):
                self._read_all(node, cache)
                continue
            self.caches.describe(node, cache)
            if node.target is INDEXER:
                self._own[node] = self._exchanged(node, cache)
            elif node.target is ATTENTION:
                self._attend(node)
            else:
                positions = argument(node, "positions")
                node.replace_input_with(positions, self._at(cache).of(positions))
                infer(node)

    def _read_all(self, reader: Node, cache: Node) -> None:
        """Let a reader of which the rank has a stretch of the queries read the rows of all ranks."""
        table = argument(reader, "block_table")
        if reader.target is ATTENTION and argument(reader, "rows"):
            indexer = picked_by(reader)
            table = self._tables.get(indexer) if indexer is not None else None
        self._tables[reader] = table
        for name in ("keys",) if reader.target is INDEXER else ("latent", "rope"):
            operand = argument(reader, name)
            if isinstance(operand, Node):
                rows = self.caches.rows_of_all(operand, table, reader)
                self.gathered.append(rows)
                reader.replace_input_with(operand, rows)
        for name, value in (("rows", False), ("block_table", None), ("descriptor", self.caches.contiguous(cache))):
            reader.update_kwarg(name, value)
        infer(reader)

    def _at(self, cache: Node) -> Places:
        run = self.caches.run(cache)
        if run not in self._places:
            self._places[run] = Places(self.program.graph_module.graph, self.caches.ways, run)
        return self._places[run]

    def _exchanged(self, indexer: Node, cache: Node) -> Node:
        """Let the indexer pick among the rank's keys; a node with those of all ranks' picks that the rank has."""
        graph, places, queries = indexer.graph, self._at(cache), shape(argument(indexer, "q"))[1]
        table, keys = argument(indexer, "block_table"), argument(indexer, "keys")
        rounds = self.caches.whole[cache][-2] if table is None else shape(table)[1] * self.caches.whole[cache][-2]
        limits = rows_of_limits(argument(indexer, "lengths"), queries, rounds, indexer)
        held = places.held(limits)
        operands: dict[str, Any] = {"lengths": None, "mask": None}
        if queries == 1:
            operands["lengths"] = call(graph, ATEN.reshape.default, (held, [-1]), like=indexer, before=indexer)
        else:
            operands["mask"] = _seen(held, rounds // self.caches.ways, indexer)
        args = (argument(indexer, "q"), keys, argument(indexer, "weights"), operands["lengths"], operands["mask"])
        kwargs = {**{name: value for name, value in indexer.kwargs.items() if name not in operands}, "rows": False}
        own = call(graph, INDEXER, args, kwargs, like=indexer, before=indexer, replaces=[indexer])
        scored = {name: argument(indexer, name) for name in SCORED_BY}
        scores = call(graph, SCORES, (*args[:3], own), scored, like=indexer, before=indexer)
        k, ways = argument(indexer, "k"), places.ways
        each = bytes_a_row(k, ways)
        pruned = self.always or each["pruned"] < each["unpruned"]
        attributes = {"k": k, "ways": ways, "run": places.run, "group": SP_GROUP, "pruned": pruned}
        found = call(graph, EXCHANGE, (scores, own), attributes, like=indexer, before=indexer)
        self.exchanges.append((found, indexer.name))
        return found

    def _attend(self, attention: Node) -> None:
        """Let the attention read the rows that the rank has, and put the ranks' parts together."""
        indexer = picked_by(attention)
        assert indexer is not None
        attention.update_arg(4, self._own[indexer])
        attention.update_kwarg("rows", False)
        attention.update_kwarg("block_table", argument(indexer, "block_table"))
        infer(attention)
        self.merged += merge_attention(attention, self.caches.ways)


def _require(program: CapturedProgram, ways: int) -> None:
    """CompileError where an indexer or an attention has what ranks cannot share out."""
    for node in program.graph_module.graph.nodes:
        told = ""
        if node.target is INDEXER and argument(node, "mask") is not None and STRETCH not in node.meta:
            told = "hides keys by a mask, of which a rank's part is not known: give it lengths"
        elif node.target is ATTENTION and picked_by(node) is None and STRETCH not in node.meta:
            told = f"reads a list that is no indexer's own ({described(argument(node, 'indices'))})"
        elif node.target is ATTENTION and argument(node, "sink") is not None:
            told = "has a sink, which every rank would count"
        if told:
            place = source_line(node) or module_path(node) or "no source"
            raise CompileError(f"sp {ways}: {node.name} ({described(node)}, {place}) {told}: leave out --sp")


def picked_by(attention: Node) -> Node | None:
    """The indexer whose list an attention reads, None where it reads another."""
    node = argument(attention, "indices")
    while isinstance(node, Node) and (is_cast(node) or packet(node) in ("clone", "contiguous", "alias", "detach")):
        node = node.args[0]
    return node if isinstance(node, Node) and node.target is INDEXER else None


def _seen(held: Node, tokens: int, before: Node) -> Node:
    """Which of the rank's ``tokens`` places each query sees, bool [B or 1, S, tokens], ``held`` being how many."""
    graph, value = before.graph, held.meta["val"]
    options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    places = call(graph, ATEN.arange.default, (tokens,), options, like=before, before=before)
    column = call(graph, ATEN.unsqueeze.default, (held, -1), like=before, before=before)
    return call(graph, ATEN.lt.Tensor, (places, column), like=before, before=before)


def _result(name: str, work: _Work) -> PassResult:
    remarks = list[Remark]()
    sums: dict[str, int] = dict.fromkeys(("sent", "pruned", "overflow", "unpruned", "scores"), 0)
    for found, indexer in work.exchanges:
        sent = bytes_of_exchange(found, work.caches.ways)
        told = f"{found.name}: ranks together send {sent['sent']:,} bytes a step; scores of all keys {sent['scores']:,}"
        if argument(found, "pruned"):
            told += (
                f", all picks {sent['unpruned']:,}, {sent['unpruned'] / sent['pruned']:.2f} times as many; where more "
                f"keys share the last pick's bin than a rank has room for, {sent['overflow']:,} on top"
            )
        else:
            told += f"; these are all picks, as limits and histogram would make it {sent['pruned']:,}"
        source, module = source_line(found) or "", module_path(found)
        remarks.append(Remark("passed", name, told, found.name, source, (indexer, found.name), module=module))
        sums = {key: sums[key] + more for key, more in sent.items()}
    gathered = sum(node.meta["val"].nbytes for node in work.merged if "all_gather" in str(node.target))
    summed = sum(node.meta["val"].nbytes for node in work.merged if "all_gather" not in str(node.target))
    counts = {"exchanges": len(work.exchanges), "caches": len(work.caches.shares)}
    counts |= {"bytes_exchanged": sums["sent"], "bytes_unpruned": sums["unpruned"], "bytes_scores": sums["scores"]}
    ways, whole = work.caches.ways, sum(node.meta["val"].nbytes for node in work.gathered)
    if work.gathered:
        told = (
            f"each rank reads {len(work.gathered)} caches whole, for queries of its stretch: the ranks send {whole:,} "
            "bytes together"
        )
        remarks.append(Remark("passed", name, told, nodes=tuple(node.name for node in work.gathered)))
    return PassResult(
        True, tuple(remarks), {**counts, "bytes_merged": gathered + ways * summed, "bytes_gathered": whole}
    )


def bytes_of_exchange(found: Node, ways: int) -> dict[str, int]:
    """Bytes that all ranks together send in an exchange of a step (``sent``), and would otherwise."""
    batch, queries, k = found.meta["val"].shape
    scores = found.all_input_nodes[0]
    table, keys = argument(scores, "block_table"), shape(argument(scores, "keys"))[1]
    tokens = ways * keys * (1 if table is None else shape(table)[1])
    each = {**bytes_a_row(k, ways), "scores": 4 * tokens}
    each["sent"] = each["pruned"] if argument(found, "pruned") else each["unpruned"]
    return {name: batch * queries * size for name, size in each.items()}
