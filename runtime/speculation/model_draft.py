"""Drafts of a smaller model, which has caches of its own and keeps up with what was accepted."""

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from kimigraph.runtime.generation.request import Request
from kimigraph.runtime.generation.slots import SlotCaches
from kimigraph.runtime.speculation.pooled_keys import forget_behind
from kimigraph.runtime.speculation.replay_log import ReplayLog
from kimigraph.runtime.speculation.rounds import Verify

Decode = Callable[[list[list[int]], list[int]], Tensor]


class DraftPrograms(Protocol):
    """The steps of the smaller model."""

    def step(self, batch: int, tokens: int, caches: Mapping[str, Tensor]) -> Decode:
        """A step that writes its states."""
        ...

    def verify(self, batch: int, tokens: int, caches: Mapping[str, Tensor]) -> Verify:
        """A step that writes the log instead."""
        ...


class ModelDraft:
    """The likeliest tokens by a model over ``slots``, ``log`` keeping its recurrent states (None: it has none).

    A round first reads what was accepted since the last one, ``window`` tokens a step, each sequence as many as it has:
    the log's fold takes them in. Then it decodes ahead, and puts back the states that this changed.
    A sequence that is new in its slot is read from its beginning.
    """

    def __init__(
        self, programs: DraftPrograms, slots: SlotCaches, log: ReplayLog | None, window: int, context: int
    ) -> None:
        self._programs, self._slots, self._log = programs, slots, log
        self._window, self._context = window, context
        self._owners: dict[int, int] = {}
        self._written: dict[int, int] = {}

    def propose(self, rows: int, running: Mapping[int, Request], tokens: int) -> dict[int, list[int]]:
        """``tokens`` tokens for each sequence that has room for them."""
        fitting = {slot: one for slot, one in running.items() if one.length + self._window <= self._context}
        if not fitting:
            return {}
        for slot, request in fitting.items():
            self._own(slot, request.number)
        found = {slot: [token] for slot, token in self._read(rows, fitting).items()}
        if tokens > 1:
            self._ahead(rows, fitting, found, tokens)
        return found

    def _own(self, slot: int, number: int) -> None:
        if self._owners.get(slot) == number:
            return
        self._owners[slot], self._written[slot] = number, 0
        if self._log is not None:
            self._log.reset(slot)

    def _read(self, rows: int, running: Mapping[int, Request]) -> dict[int, int]:
        """Take in what each sequence has more than was read; the likeliest token behind its last one.

        Who has nothing more gets padding behind its last token, which nothing reads.
        """
        behind: dict[int, int] = {}
        caches = self._slots.first(rows)
        while pending := [slot for slot, request in running.items() if self._written[slot] < request.length]:
            ids, counts = [[0] * self._window for _ in range(rows)], [0] * rows
            lengths = [self._written[slot] if slot in running else 0 for slot in range(rows)]
            for slot in pending:
                at = self._written[slot]
                piece = running[slot].ids(at, at + self._window)
                ids[slot][: len(piece)], counts[slot] = piece, len(piece)
            log = {} if self._log is None else self._log.log(rows)
            logits = self._programs.verify(rows, self._window, {**log, **caches})(ids, lengths)
            if self._log is not None:
                self._log.verified(rows)
                self._log.commit(counts)
            best = logits.argmax(-1).tolist()
            for slot in pending:
                self._written[slot] += counts[slot]
                behind[slot] = best[slot][counts[slot] - 1]
        return behind

    def _ahead(self, rows: int, running: Mapping[int, Request], found: dict[int, list[int]], tokens: int) -> None:
        """Decode until each sequence has ``tokens`` drafts."""
        changed = () if self._log is None else (self._log.state[:, :rows], self._log.conv[:, :rows])
        kept = [stack.clone() for stack in changed]
        caches = self._slots.first(rows)
        ends = [running[slot].length if slot in running else 0 for slot in range(rows)]
        forget_behind(caches, torch.tensor(ends, device=next(iter(caches.values())).device))
        step = self._programs.step(rows, 1, caches)
        for ahead in range(tokens - 1):
            ids = [found[slot][-1:] if slot in found else [0] for slot in range(rows)]
            # Behind its last token a sequence without drafts keeps what it has.
            lengths = [running[slot].length + ahead if slot in running else 0 for slot in range(rows)]
            best = step(ids, lengths).argmax(-1).tolist()
            for slot, drafts in found.items():
                drafts.append(best[slot])
        for stack, before in zip(changed, kept, strict=True):
            stack.copy_(before)
