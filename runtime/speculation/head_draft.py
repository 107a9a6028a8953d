"""Drafts of the model's own multi-token-prediction layer, which goes on from what the model's head reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kimigraph.runtime.generation.bound_step import BoundStep
from kimigraph.runtime.generation.request import Request
from kimigraph.runtime.generation.slots import Slots

UNREAD = "draft.hidden"
"""Among the caches: hidden states [rows, 1 + n, hidden size] of the last tokens, which the layer has yet to take in."""


Bound = Callable[[int, int, Mapping[str, Tensor]], BoundStep]
"""Gives the step of so many rows by so many tokens over these caches."""


@dataclass(frozen=True)
class HeadSteps:
    """Steps of a model that also give what its head reads, and of the layer that takes it; ``*_all`` those that give
    the logits of all tokens, the others of the last alone."""

    model: Bound
    model_all: Bound
    layer: Bound
    layer_all: Bound


class HeadDraft:
    """The likeliest tokens by the layer behind the model's last one, over caches of its own among those of ``slots``.

    The layer takes the hidden state of a token together with the token behind it. What a round accepted it takes in
    when it is next asked, ``1 + drafts`` tokens at most in one step; further drafts follow from its own hidden states.
    What it wrote for rejected tokens lies behind its length, where it writes next.
    """

    def __init__(self, steps: HeadSteps, slots: Slots, drafts: int, context: int) -> None:
        self._steps, self._slots, self._window = steps, slots, 1 + drafts
        self._last = context - self._window
        self._taken: dict[int, int] = {}

    def prepare(self, rows: int) -> None:
        """Compile now what drafts of so many rows take."""
        caches = self._slots.first(rows)
        self._steps.layer_all(rows, self._window, caches)
        if self._window > 2:
            self._steps.layer(rows, 1, caches)

    def prepare_reading(self, tokens: int) -> None:
        """The same for a piece of a prompt."""
        self._steps.layer(1, tokens, self._slots.staging)

    def read(self, request: Request, tokens: int) -> None:
        """A piece of the prompt in the staging place was read. The token behind its last may not be there yet: what
        belongs to that one is taken in again."""
        caches = self._slots.staging
        hidden = self._steps.model(1, tokens, caches).hidden_states
        behind = request.ids(request.written + 1, request.written + 1 + tokens)
        padded = [*behind, *[0] * (tokens - len(behind))]
        caches[UNREAD][0, 0].copy_(hidden[0, -1])  # results of a step hold until the next one
        self._steps.layer(1, tokens, caches).after([padded], [request.written], hidden)
        request.unread = 1

    def stepped(self, rows: int, running: Mapping[int, Request]) -> None:
        """A plain step took in the last token of each sequence."""
        caches = self._slots.first(rows)
        hidden = self._steps.model(rows, 1, caches).hidden_states
        behind = {slot: one for slot, one in running.items() if self._taken.get(one.number) != one.written}
        if any(request.unread >= self._window for request in behind.values()):
            hidden, behind = hidden.clone(), {}
            self._take_in(rows, running)
        places = [request.unread if slot in behind else 0 for slot, request in running.items()]
        caches[UNREAD][list(running), places] = hidden[list(running), 0]
        for request, place in zip(running.values(), places, strict=True):
            request.unread = place + 1

    def verified(self, rows: int, running: Mapping[int, Request], made: list[int]) -> None:
        """A round gave each sequence ``made`` tokens, by slot: so many of those in the step stay."""
        caches = self._slots.first(rows)
        caches[UNREAD].copy_(self._steps.model_all(rows, self._window, caches).hidden_states)
        for slot, request in running.items():
            request.unread = made[slot]

    def propose(self, rows: int, running: Mapping[int, Request], tokens: int) -> dict[int, list[int]]:
        """``tokens`` tokens for each sequence; the host waits for the device once."""
        logits, hidden = self._take_in(rows, running)
        device, every = logits.device, range(rows)
        last = torch.tensor([running[slot].unread - 1 if slot in running else 0 for slot in every], device=device)
        places = torch.tensor([running[slot].written if slot in running else 0 for slot in every], device=device)
        row = torch.arange(rows, device=device)
        drafts, hidden = [logits[row, last].argmax(-1)], hidden[row, last].unsqueeze(1)
        for ahead in range(tokens - 1):
            step = self._steps.layer(rows, 1, self._slots.first(rows))
            drafts.append(step.after(drafts[-1].unsqueeze(1), places + ahead, hidden)[:, -1].argmax(-1))
            hidden = step.hidden_states
        found: list[list[int]] = torch.stack(drafts, dim=1).tolist()
        return {slot: found[slot] for slot in running}

    def _take_in(self, rows: int, running: Mapping[int, Request]) -> tuple[Tensor, Tensor]:
        """Give the layer what it has yet to take in; its logits and hidden states [rows, 1 + n, ..], of each sequence
        the first ``unread`` ones."""
        caches = self._slots.first(rows)
        ids, lengths = [[0] * self._window for _ in range(rows)], [0] * rows
        self._taken = {}
        for slot, request in running.items():
            base = request.written - request.unread
            ids[slot][: request.unread] = request.ids(base + 1, request.written + 1)
            # Who is nearer to the end gets no more drafts: what stands in the layer's caches is nobody's.
            lengths[slot] = min(base, self._last)
            self._taken[request.number] = request.written
        step = self._steps.layer_all(rows, self._window, caches)
        return step.after(ids, lengths, caches[UNREAD]), step.hidden_states
