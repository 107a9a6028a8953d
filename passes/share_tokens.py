"""``share-tokens``: of a prefill's tokens each of several ranks takes a stretch.

What is captured is the step of one stretch (``kimigraph.capture.stretches``), so that all that works token by token is
as it must be on a rank. This pass puts in what crosses ranks: windows of convolutions, states of recurrences, rows of
caches, results.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import Node

from kimigraph.ir import purity
from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import fake_mode, infer
from kimigraph.ir.mesh import SP_GROUP
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.own_rows import OWN_ROWS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.ir.schemas import bind
from kimigraph.passes.algebra.nodes import argument, described, dtype, shape
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.sharding.stretches import Stretches, share_convolution, share_recurrence

ATEN = torch.ops.aten
CONVOLUTION, RECURRENCE = OPERATORS["short_conv"].overload, OPERATORS["kda_prefill"].overload
WRITERS = tuple(OPERATORS[name].overload for name in ("latent_write", "index_key_write"))
READERS = (OPERATORS["lightning_indexer"].overload, OPERATORS["sparse_attention"].overload)
ROWS = ("values", "rope_values", "positions", "cos", "sin")
"""Operands of writers with a row for each token."""
STRETCH = "stretch"
"""``info`` of a program has the tokens of a stretch under it, and ``meta`` of operators that read whole caches."""


@dataclass(frozen=True)
class ShareTokens(Pass):
    """Makes a rank's part of the step of all tokens from the step of one stretch; others are left as they are.

    Ranks take stretches of a step of at least ``least_tokens`` tokens: of fewer, collectives and gathered caches take
    longer than the tokens.
    """

    least_tokens: int = 256

    name: ClassVar[str] = "share-tokens"
    summary: ClassVar[str] = "each of sp ranks takes a stretch of a prefill's tokens"
    changes_formats: ClassVar[bool] = True
    pattern: ClassVar[str] = "the step of one stretch of tokens, captured for `--phase prefill --sp N`"
    constraints: ClassVar[tuple[str, ...]] = (
        "`--sp` is more than 1 and divides the tokens, of which there are at least `least-tokens`; no `--pp`",
        "the model takes the lengths of sequences as an input (`lengths`)",
        "states pass through `short_conv` and `kda_prefill`, caches through their writers",
    )
    effect: ClassVar[str] = (
        "tokens and lengths of a rank's stretch; gathers of convolution windows, of what stretches do to KDA states "
        "([K, K] and [K, V] a head), of new cache rows, and of the results"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Put in what crosses ranks; CompileError where a state or cache takes a way that is not known."""
        tokens, ways = int(program.info.get(STRETCH, 0)), context.config.sp
        if not tokens or ways == 1:
            return PassResult(False)
        work = _Work(program, tokens, ways)
        work.run()
        graph = program.graph_module.graph
        purity.dead_code(graph)
        graph.lint()
        program.graph_module.recompile()
        del program.info[STRETCH]
        gathers = [node for node in graph.nodes if SP_GROUP in node.args and node.target is not OWN_ROWS]
        sent = sum(node.meta["val"].nbytes for node in gathers) * (ways - 1) // ways
        told = (
            f"each of {ways} ranks takes {tokens} of {tokens * ways} tokens; {len(gathers)} gathers send {sent:,} "
            "bytes a rank"
        )
        nodes = tuple(node.name for node in gathers)
        remark = Remark("passed", self.name, told, nodes[0] if nodes else "", nodes=nodes)
        return PassResult(True, (remark,), {"stretch": tokens, "gathers": len(gathers), "bytes_sent": sent})


class _Work:
    """One run over one program of a stretch of ``tokens`` tokens."""

    def __init__(self, program: CapturedProgram, tokens: int, ways: int) -> None:
        self._program, self._graph, self._tokens, self._ways = program, program.graph_module.graph, tokens, ways
        self._joined: dict[Node, Node] = {}

    def run(self) -> None:
        """Rewrite the whole program."""
        nodes = list(self._graph.nodes)
        self._require_known(nodes)
        self._share_inputs()
        for node in nodes:
            if node.target is CONVOLUTION:
                share_convolution(node, self._ways)
            elif node.target is RECURRENCE:
                share_recurrence(node, self._ways)
            elif node.target in WRITERS:
                self._write_all(node)
            elif node.target in READERS:
                node.meta[STRETCH] = True
            elif node.op == "output":
                results = [self._result(node, value) for value in node.args[0]]
                node.args = (tuple(results),)

    def _require_known(self, nodes: list[Node]) -> None:
        """CompileError for what reads or writes a state or cache in a way that needs the tokens before the stretch."""
        known: dict[Node, Node] = {}
        kept = {self._program.placeholders[spec.name] for spec in self._program.inputs if spec.kind == "cache"}
        for node in nodes:
            touched = [item for item in node.all_input_nodes if purity.storage_root(item, known) in kept]
            view = purity.is_pure(node) and purity.storage_root(node, known) in kept
            copied = node.target is ATEN.copy_.default
            known_operator = node.target in (CONVOLUTION, RECURRENCE, *WRITERS, *READERS)
            told = "" if known_operator or copied or view or not touched else f"touches {touched[0].name}"
            if node.target is RECURRENCE and argument(node, "cu_seqlens") is not None:
                told = "runs over packed sequences"
            if node.target is CONVOLUTION and self._tokens < _window(node):
                told = "has a window wider than a stretch"
            if told:
                place = source_line(node) or module_path(node) or "no source"
                raise CompileError(
                    f"share-tokens: {node.name} ({described(node)}, {place}) {told}, and what it needs of other "
                    "stretches is not known: compile with --disable-pass share-tokens"
                )

    def _share_inputs(self) -> None:
        """Tokens of all stretches come in, and each rank takes its own, behind as many as its number says."""
        nodes = self._program.placeholders
        [spec] = [item for item in self._program.inputs if item.source == "input_ids"]
        [lengths] = [nodes[item.name] for item in self._program.inputs if item.source == "lengths"]
        ids, whole = nodes[spec.name], (spec.shape[0], spec.shape[1] * self._ways)
        value = ids.meta["val"]
        with fake_mode(self._graph):
            ids.meta["val"] = torch.empty(whole, dtype=value.dtype, device=value.device)
        own = replace(spec, shape=whole, stride=(whole[1], 1))
        self._program.inputs = tuple(own if item.name == spec.name else item for item in self._program.inputs)
        first = next(node for node in self._graph.nodes if node.op != "placeholder")
        readers, counted = list(ids.users), list(lengths.users)
        ranks = Stretches(first, self._ways)
        tokens = ranks.own(ids, 1)
        options: dict[str, Any] = {"dtype": dtype(lengths), "device": lengths.meta["val"].device}
        starts = ranks.make(ATEN.arange.start_step, 0, self._ways * self._tokens, self._tokens, **options)
        start = ranks.make(ATEN.add.Tensor, lengths, ranks.own(starts, 0))
        for node in readers:
            node.replace_input_with(ids, tokens)
        for node in counted:
            node.replace_input_with(lengths, start)

    def _write_all(self, writer: Node) -> None:
        """Every rank writes the rows of all stretches; who shares out a cache keeps its own of them."""
        ranks = Stretches(writer, self._ways)
        operands = [value for name, value in bind(writer).items() if name in ROWS and isinstance(value, Node)]
        for operand in operands:
            if operand not in self._joined:
                self._joined[operand] = ranks.joined(operand, 1)
            writer.replace_input_with(operand, self._joined[operand])
        infer(writer)

    def _result(self, output: Node, value: Node) -> Node:
        """Results of all tokens joined; of the last token those of the last rank."""
        ranks = Stretches(output, self._ways)
        if shape(value)[1] == self._tokens:
            return ranks.joined(value, 1)
        return ranks.number(ranks.all(value), self._ways - 1)


def _window(convolution: Node) -> int:
    """The inputs that a convolution keeps."""
    state = argument(convolution, "initial_state")
    return shape(argument(convolution, "weight"))[-1] - 1 if state is None else shape(state)[2]
