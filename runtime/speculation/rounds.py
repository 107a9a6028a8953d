"""A round of speculation: drafts of all running sequences verified in one step, and what they were right in kept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from kimigraph.ir.errors import UsageError
from kimigraph.runtime.generation.request import Request
from kimigraph.runtime.speculation.acceptance import Accepted, accept_greedy, accept_sampled, likelihoods
from kimigraph.runtime.speculation.drafts import Draft, FollowsModel
from kimigraph.runtime.speculation.lengths import DraftLengths
from kimigraph.runtime.speculation.pooled_keys import forget_behind
from kimigraph.runtime.speculation.rollback import Rollback

Verify = Callable[[list[list[int]], list[int]], Tensor]
"""Takes tokens [B][1 + n] behind lengths [B] into caches and log and returns the logits [B, 1 + n, V] of them all."""


class VerifyPrograms(Protocol):
    """Where verifying steps come from."""

    def verify(self, batch: int, tokens: int, caches: Mapping[str, Tensor]) -> Verify:
        """The step of ``batch`` rows by ``tokens`` tokens over caches and log, which writes no recurrent state."""
        ...


@dataclass
class SpeculationCounts:
    """What rounds did: ``drafted`` tokens of which ``accepted`` were right, ``made`` new tokens of ``rows`` rows in
    ``rounds`` steps; and plain steps beside them."""

    rounds: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    made: int = 0
    seconds: float = 0.0
    plain: int = 0
    plain_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For reports: the counts, the share of drafts that were right, new tokens a sequence and step, and how many
        times the tokens of a second of plain steps a second of rounds gave (None without either)."""
        both = self.made and self.plain
        return {
            **vars(self),
            "acceptance": self.accepted / max(self.drafted, 1),
            "tokens_per_step": self.made / max(self.rows, 1),
            "speed_up": (self.made / self.seconds) / (self.plain / self.plain_seconds) if both else None,
        }


class Speculation:
    """Rounds of at most ``drafts`` drafts a sequence: with ``adaptive`` as many as its earlier ones make worth while.

    ``rollback`` keeps recurrent states (None: the model has none).

    Greedy sequences get the tokens that they would get alone, drawn ones tokens of the same distribution. Sequences
    without drafts take part with one token. Between verification and commit nothing that a sequence has is changed: an
    error there leaves every sequence as it was.
    """

    def __init__(
        self, programs: VerifyPrograms, draft: Draft, drafts: int, rollback: Rollback | None, adaptive: bool = True
    ) -> None:
        if drafts < 1:
            raise UsageError(f"draft_tokens is {drafts}: give at least 1")
        self.drafts, self.counts, self.adaptive = drafts, SpeculationCounts(), adaptive
        self._lengths = DraftLengths(drafts)
        self._programs, self.draft, self._rollback = programs, draft, rollback

    @property
    def state_bytes(self) -> dict[str, int]:
        """Bytes of recurrent states and what rounds keep beside them: held, and moved so far."""
        if self._rollback is None:
            return {"held": 0, "moved": 0}
        return {"held": self._rollback.bytes_held, "moved": self._rollback.bytes_moved}

    @property
    def _following(self) -> FollowsModel | None:
        """The draft, where it is one that is told of the model's steps."""
        return self.draft if isinstance(self.draft, FollowsModel) else None

    def prepare(self, rows: int, caches: Mapping[str, Tensor]) -> None:
        """Compile now what rounds of the first ``rows`` sequences take."""
        self._step(rows, caches)
        if self._following is not None:
            self._following.prepare(rows)

    def prepare_reading(self, tokens: int) -> None:
        """Compile now what is called when so many tokens of a prompt are read."""
        if self._following is not None:
            self._following.prepare_reading(tokens)

    @property
    def following(self) -> bool:
        """Whether the draft is told of the model's steps."""
        return self._following is not None

    def read(self, request: Request, tokens: int) -> None:
        """So many tokens of a prompt were read in the staging place."""
        if self._following is not None:
            self._following.read(request, tokens)

    def stepped(self, rows: int, running: Mapping[int, Request]) -> None:
        """A plain step over the first ``rows`` slots took in the last token of each sequence."""
        if self._following is not None:
            self._following.stepped(rows, running)

    def _step(self, rows: int, caches: Mapping[str, Tensor]) -> Verify:
        """The verifying step over the first ``rows`` sequences, compiled where it is not yet."""
        log = {} if self._rollback is None else self._rollback.log(rows)
        return self._programs.verify(rows, 1 + self.drafts, {**log, **caches})

    def round(
        self, rows: int, running: Mapping[int, Request], caches: Mapping[str, Tensor], context: int
    ) -> dict[int, list[int]] | None:
        """New tokens of the ``running`` sequences by slot; None where a plain step is as good.

        That is where nobody has a draft, and where a sequence is so near the end of its ``context`` that the drafts'
        places are not there.
        """
        started = perf_counter()
        made = self._round(rows, running, caches, context)
        if made is not None:
            self.counts.seconds += perf_counter() - started
        return made

    def plain(self, tokens: int, seconds: float) -> None:
        """A plain step gave so many tokens in that time."""
        self.counts.plain += tokens
        self.counts.plain_seconds += seconds

    def _round(
        self, rows: int, running: Mapping[int, Request], caches: Mapping[str, Tensor], context: int
    ) -> dict[int, list[int]] | None:
        if any(request.written + 1 + self.drafts > context for request in running.values()):
            return None
        wanted = self._lengths.wanted(running) if self.adaptive else dict.fromkeys(running, self.drafts)
        most = max(wanted.values())
        proposed = self.draft.propose(rows, running, most) if most else {}
        proposed = {slot: draft[: wanted[slot]] for slot, draft in proposed.items()}
        if not any(proposed.values()):
            return None
        ids, lengths = [[0] * (1 + self.drafts) for _ in range(rows)], [0] * rows
        drafts = [[-1] * self.drafts for _ in range(rows)]
        for slot, request in running.items():
            given = proposed.get(slot, [])
            drafts[slot][: len(given)] = given
            ids[slot][: 1 + len(given)] = [request.tokens[-1], *given]
            lengths[slot] = request.written
        return self._verified(ids, lengths, torch.tensor(drafts), running, caches)

    def _verified(
        self,
        ids: list[list[int]],
        lengths: list[int],
        drafts: Tensor,
        running: Mapping[int, Request],
        caches: Mapping[str, Tensor],
    ) -> dict[int, list[int]]:
        rows, step = len(ids), self._step(len(ids), caches)
        # Behind the step these copies would wait for its end, and what tests the drafts could not be queued meanwhile.
        device = next(iter(caches.values())).device
        given, live = drafts.to(device), torch.tensor([int(slot in running) for slot in range(rows)], device=device)
        behind = torch.tensor(lengths, device=device)
        logits = step(ids, lengths)
        if self._rollback is not None:
            self._rollback.verified(rows)
        try:
            accepted = self._accept(logits, given, running)
            counts = accepted.counts * live
            if self._rollback is not None:
                self._rollback.commit(counts)  # before anything is read back: the device does not wait for the host
        except BaseException:
            if self._rollback is not None:
                self._rollback.abort()
            forget_behind(caches, behind)
            raise
        forget_behind(caches, behind + counts)
        drafted: list[int] = (drafts >= 0).sum(-1).tolist()
        made, tokens = self._read(counts, accepted.tokens)
        if self._following is not None:
            self._following.verified(rows, running, made)
        self._count(made, drafted, running)
        return {slot: tokens[slot][: made[slot]] for slot in running}

    @staticmethod
    def _read(counts: Tensor, tokens: Tensor) -> tuple[list[int], list[list[int]]]:
        """Both on the host, which waits for the device once."""
        rows: list[list[int]] = torch.cat([counts.unsqueeze(-1), tokens], dim=-1).tolist()
        return [row[0] for row in rows], [row[1:] for row in rows]

    def _accept(self, logits: Tensor, drafts: Tensor, running: Mapping[int, Request]) -> Accepted:
        drawing = [slot for slot, request in running.items() if request.sampling.temperature > 0]
        found = accept_greedy(logits, drafts)
        if not drawing:
            return found
        place = torch.tensor(drawing, device=logits.device)
        samplings = [running[slot].sampling for slot in drawing]
        numbers = [[running[slot].draws.next() for _ in range(1 + self.drafts)] for slot in drawing]
        uniform = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
        drawn = accept_sampled(likelihoods(logits[place], samplings), drafts[place], uniform)
        return Accepted(
            found.counts.index_copy(0, place, drawn.counts), found.tokens.index_copy(0, place, drawn.tokens)
        )

    def _count(self, made: list[int], drafted: list[int], running: Mapping[int, Request]) -> None:
        for slot, request in running.items():
            self._lengths.observe(request, drafted[slot], made[slot] - 1)
        self.counts.rounds += 1
        self.counts.rows += len(running)
        self.counts.drafted += sum(drafted)
        self.counts.accepted += sum(made) - len(running)
        self.counts.made += sum(made)
