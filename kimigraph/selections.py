"""Selections (top-k picks of indexers and routers): recorded, compared and injected.

A near-tie that falls the other way changes results by far more than rounding does. Verification therefore compares the
picks first and then runs the captured graph with the program's own picks.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.fx import Interpreter, Node

from kimigraph.ir.cache_formats import rounded
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.memory_plan import clear_plan
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.purity import mutated_arguments, storage_root

_TOPK = torch.ops.aten.topk.default
HIDDEN = -1e30
"""Scores at or below this belong to masked positions."""


@dataclass
class Selections:
    """``picked`` maps a top-k node to its indices, ``scores`` to what it chose from."""

    picked: dict[str, torch.Tensor] = field(default_factory=lambda: {})
    scores: dict[str, torch.Tensor] = field(default_factory=lambda: {})


class SelectionInterpreter(Interpreter):
    """Runs a captured graph, records each top-k, and replaces those that ``inject`` names."""

    def __init__(self, program: CapturedProgram, inject: dict[str, torch.Tensor] | None = None) -> None:
        super().__init__(program.graph_module)
        self._inject = inject or {}
        self.selections = Selections()

    def run_node(self, n: Node) -> Any:
        """One node; a top-k's own picks are recorded, and replaced by the given ones with their scores."""
        if n.target is not _TOPK:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        scores = args[0]
        values, indices = _TOPK(*args, **kwargs)
        self.selections.picked[n.name] = indices
        self.selections.scores[n.name] = scores
        given = self._inject.get(n.name)
        if given is not None:
            indices = _filled(given, indices)
            values = scores.gather(args[2] if len(args) > 2 else kwargs.get("dim", -1), indices)
        return values, indices


class RoundingInterpreter(SelectionInterpreter):
    """Its caches keep no more than quantised ones would: those of ``formats``, from the start and after every write.

    ``tensors`` are what it will run on, in placeholder order; they are rounded in place. ``settled`` are captured
    caches as another program left them: where a value lies within ``limit`` (of its row's largest) of the middle
    between two codes, theirs counts, as for picks. So a difference in the last bit does not become one of a code.
    """

    def __init__(
        self,
        program: CapturedProgram,
        tensors: Sequence[torch.Tensor],
        formats: Iterable[InputSpec] = (),
        inject: dict[str, torch.Tensor] | None = None,
        settled: Mapping[str, torch.Tensor] | None = None,
        limit: float = 0.0,
    ) -> None:
        super().__init__(program, inject)
        self._settled, self._limit = settled or {}, limit
        named = {spec.source: spec.name for spec in program.inputs}
        self._tensors = {spec.source: t for spec, t in zip(program.inputs, tensors, strict=True)}
        self._formats = tuple(formats)
        self._holders = {named[source]: spec for spec in self._formats for source, _ in spec.parts}
        for spec in self._formats:
            self._round(spec)

    def run_node(self, n: Node) -> Any:
        """One node; what it wrote into a cache is rounded."""
        result = super().run_node(n)
        written = {storage_root(one).name for one in mutated_arguments(n)} if self._holders else set[str]()
        for spec in {id(spec): spec for name, spec in self._holders.items() if name in written}.values():
            self._round(spec)
        return result

    def _round(self, spec: InputSpec) -> None:
        for source, own in rounded(spec, self._tensors).items():
            exact, other = self._tensors[source].float(), self._settled.get(source)
            if other is not None:
                other = other.float().to(own.device)
                slack = self._limit * exact.abs().amax(-1, keepdim=True)
                own = torch.where((exact - other).abs() <= (exact - own).abs() + slack, other, own)
            self._tensors[source].copy_(own)


def _filled(given: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Picks of the program in the form of a top-k result.

    A top-k always names k entries, hidden ones where too few are visible; the program says -1 there. Such places get
    those of the top-k's own picks that the program does not list.
    """
    picks = own.shape[-1]
    if not picks:  # nothing to pick from: a pool that no key has filled yet
        return own
    rows = given.to(own.device, torch.int64).reshape(*own.shape[:-1], -1)
    unlisted = (own.unsqueeze(-1) != rows.unsqueeze(-2)).all(-1)
    rank = torch.cat([(rows < 0) * 2, 2 - unlisted.long()], -1)  # 0 listed, 1 to fill up with, 2 left out
    order = torch.sort(rank, dim=-1, stable=True).indices[..., :picks]
    return torch.cat([rows, own], -1).gather(-1, order)


def with_selections(program: CapturedProgram) -> tuple[CapturedProgram, list[str]]:
    """A copy of an optimized program that also returns its picks, and the captured top-k node of each.

    It has no memory plan: that was made for picks that nobody keeps.
    """
    extended = program.copy()
    graph = extended.graph_module.graph
    clear_plan(graph)
    found: list[tuple[str, Node]] = []
    for node in graph.nodes:
        if node.op == "call_function" and "selects" in node.meta:
            found.append((str(node.meta["selects"]), _picks_of(node)))
        elif node.target is _TOPK:
            picks = [user for user in node.users if user.args[1] == 1]
            if picks:
                found.append((node.name, picks[0]))
    output = graph.output_node()
    results = cast("tuple[Node, ...]", output.args[0])
    output.args = ((*results, *(node for _, node in found)),)
    extended.graph_module.recompile()
    specs = tuple(OutputSpec(name=f"picks_{name}", source=f"picks.{name}") for name, _ in found)
    return replace(extended, outputs=extended.outputs + specs), [name for name, _ in found]


def _picks_of(node: Node) -> Node:
    """The picks of an operator that selects: its only result, or its second one."""
    value = node.meta["val"]
    if not isinstance(value, list | tuple):
        return node
    with node.graph.inserting_after(node):
        picks = node.graph.call_function(operator.getitem, (node, 1))
    picks.meta["val"] = cast("Sequence[torch.Tensor]", value)[1]
    return picks


def score_errors(narrow: Selections, wide: Selections) -> dict[str, torch.Tensor]:
    """By top-k node, the largest difference between the visible scores of each row, [rows]: what 16 bits cost there."""
    found: dict[str, torch.Tensor] = {}
    for name in narrow.scores.keys() & wide.scores.keys():
        one, other = narrow.scores[name].float(), wide.scores[name].float()
        visible = (one > HIDDEN) & (other > HIDDEN)
        apart = torch.where(visible, one - other, torch.zeros_like(one)).abs()
        found[name] = apart.amax(-1).reshape(-1) if apart.shape[-1] else apart.sum(-1).reshape(-1)
    return found


def check_selections(
    captured: Selections,
    program: dict[str, torch.Tensor],
    tolerance: float,
    slack: Mapping[str, torch.Tensor] | None = None,
) -> int:
    """Compare the picks as sets; entries may differ where their score is within ``tolerance`` of the cut.

    ``tolerance`` is relative to the largest magnitude among the visible scores of the row; ``slack`` [rows] by top-k
    node comes on top of it. Returns the number of differing entries; raises ``NumericsError`` naming the node, row and
    entry that differs by more.
    """
    differing = 0
    for name, picks in program.items():
        if name not in captured.picked:
            continue
        scores = captured.scores[name].float()
        width = scores.shape[-1]
        if not captured.picked[name].numel():
            continue
        scores = scores.reshape(-1, width)
        want = _as_mask(captured.picked[name].reshape(scores.shape[0], -1), width) & (scores > HIDDEN)
        got = _as_mask(picks.to(scores.device, torch.int64).reshape(scores.shape[0], -1), width) & (scores > HIDDEN)
        wrong = want ^ got
        if not wrong.any():
            continue
        visible = scores.masked_fill(scores <= HIDDEN, 0.0)
        cut = scores.masked_fill(~want, float("inf")).min(dim=-1, keepdim=True).values
        allowed = tolerance * visible.abs().amax(dim=-1, keepdim=True)
        if slack is not None and name in slack:
            allowed = allowed + slack[name].to(scores.device).unsqueeze(-1)
        far = wrong & ((scores - cut).abs() > allowed)
        far |= wrong & (want.sum(-1, keepdim=True) != got.sum(-1, keepdim=True))  # a near-tie swaps, it loses none
        if far.any():
            row, entry = (int(value) for value in far.nonzero()[0])
            raise NumericsError(
                f"{name}: row {row} picks other entries than the eager model; entry {entry} scores "
                f"{scores[row, entry].item():.6g}, the cut is {cut[row, 0].item():.6g}"
            )
        differing += int(wrong.sum())
    return differing


def _as_mask(indices: torch.Tensor, width: int) -> torch.Tensor:
    mask = torch.zeros(indices.shape[0], width + 1, dtype=torch.bool, device=indices.device)
    mask.scatter_(1, torch.where(indices < 0, torch.full_like(indices, width), indices), True)
    return mask[:, :width]
