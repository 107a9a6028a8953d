"""The scheduler of a running batch: who is read, who takes the next step, who joins and leaves."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Protocol

from torch import Tensor

from kimigraph.ir.errors import UsageError
from kimigraph.runtime.generation.request import Event, Request
from kimigraph.runtime.generation.sampling import Draws, Sampling, choose
from kimigraph.runtime.generation.slots import Slots
from kimigraph.runtime.sequence.errors import PoolExhaustedError

Step = Callable[[list[list[int]], list[int]], Tensor]
"""Takes tokens [B][S] behind lengths [B] into its caches and returns the logits [B, V] of the last ones."""

Choose = Callable[[Tensor, Sequence[Sampling], Sequence[Draws]], list[int]]
"""Takes logits [N, V], and of each row how to sample and its numbers; returns the tokens."""


class Programs(Protocol):
    """Where steps come from; what is not there yet is compiled on the first call."""

    def step(self, batch: int, tokens: int, caches: Mapping[str, Tensor]) -> Step:
        """The step of ``batch`` rows by ``tokens`` tokens over these caches."""
        ...


class Speculating(Protocol):
    """What may give running sequences several tokens in one step (``kimigraph.runtime.speculation``)."""

    drafts: int

    def round(
        self, rows: int, running: Mapping[int, Request], caches: Mapping[str, Tensor], context: int
    ) -> dict[int, list[int]] | None:
        """New tokens of each sequence by slot, all of them in the caches but the last; None: take a plain step."""
        ...

    def plain(self, tokens: int, seconds: float) -> None:
        """A plain step gave so many tokens in that time."""
        ...

    @property
    def following(self) -> bool:
        """Whether it wants to know of the steps that the next two tell; they may take steps of their own."""
        ...

    def stepped(self, rows: int, running: Mapping[int, Request]) -> None:
        """A plain step over the first ``rows`` slots took in the last token of each sequence, which none counts yet."""
        ...

    def read(self, request: Request, tokens: int) -> None:
        """So many tokens of a prompt were read in the staging place, which the request does not count yet."""
        ...


class Engine:
    """Continuous batching over slots, which may share a pool of pages: a sequence joins when all that it may need is
    free, so that none is ever ended for want of room.

    ``step`` gives each running sequence its next token, in one program call over the smallest of ``batches`` rows that
    holds them all, and reads on in the prompt of one sequence: pieces of the sizes ``chunks`` (the largest that fit,
    then smaller ones, then token by token), at most ``budget`` tokens a step, so that running sequences never wait for
    a long prompt. A prompt is read in a row of its own and seated when it is done, so that no step of the batch touches
    it. Rows without a sequence take token 0 at length 0; nobody reads them. With ``speculation`` a sequence may get
    several tokens a step. ``choose`` takes tokens from logits (``kimigraph.runtime.generation.sampling``).
    """

    def __init__(
        self,
        programs: Programs,
        slots: Slots,
        context: int,
        *,
        batches: Sequence[int] | None = None,
        chunks: Sequence[int] = (),
        budget: int = 2048,
        max_waiting: int | None = None,
        speculation: Speculating | None = None,
        choose: Choose = choose,
    ) -> None:
        self._programs, self.slots, self.context, self._choose = programs, slots, context, choose
        self.speculation = speculation
        self.chunks = sorted({1, *(size for size in chunks if size <= context)}, reverse=True)
        self._budget, self._max_waiting = budget, max_waiting
        self.batches = tuple(sorted({*(batches or buckets(slots.slots)), slots.slots}))
        self._waiting: deque[Request] = deque()
        self._reading: Request | None = None
        self._running: dict[int, Request] = {}
        self._aborted: list[Event] = []
        self._count = 0
        self.read = self.made = 0
        """Prompt tokens read and new tokens made so far."""

    @property
    def busy(self) -> bool:
        """Whether any sequence waits, is being read or runs, or has an end that was not told yet."""
        return bool(self._waiting or self._reading or self._running or self._aborted)

    @property
    def requests(self) -> list[Request]:
        """The sequences that have not ended: running, being read, waiting."""
        return [*self._running.values(), *([self._reading] if self._reading else []), *self._waiting]

    def submit(self, prompt: Sequence[int], sampling: Sampling, place: int = 0, stop_ids: Sequence[int] = ()) -> int:
        """A new sequence; its number, by which events name it.

        ``place`` is its place among those of one call, which their draws depend on. ``stop_ids`` are the model's, for a
        sampling that names none. UsageError for a prompt that is empty or larger than the caches, or that with its new
        tokens can never have room; PoolExhaustedError when ``max_waiting`` sequences wait already.
        """
        if not prompt:
            raise UsageError("the prompt holds no token: give at least one, such as the model's first (bos) token")
        if len(prompt) > self.context:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, the caches hold {self.context}: shorten it, or allow a larger "
                "context"
            )
        if not self.slots.holds(self._room(len(prompt), sampling)):
            raise UsageError(
                f"{len(prompt)} tokens of a prompt and up to {sampling.max_new_tokens} new ones are more than all "
                "pages hold: ask for fewer (max_new_tokens), or allow more pages"
            )
        if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
            raise PoolExhaustedError("waiting sequence", 1, 0, self._max_waiting, "max_waiting")
        ends = sampling.stop_ids if sampling.stop_ids is not None else stop_ids
        draws = Draws(sampling.seed, place)
        self._count += 1
        self._waiting.append(Request(self._count, tuple(prompt), sampling, draws, frozenset(ends)))
        return self._count

    def fork(self, number: int, sampling: Sampling | None = None, place: int = 0) -> int:
        """A second sequence with the tokens of a running one so far; its number.

        It goes on by ``sampling`` (None: as its original) with draws of its own, and counts ``max_new_tokens`` from the
        prompt. Pages are shared until one of the two writes them. UsageError for a sequence that does not run (it
        waits, is being read, or has ended), PoolExhaustedError without a free slot or pages; then nothing has changed.
        """
        slot = next((slot for slot, request in self._running.items() if request.number == number), None)
        if slot is None:
            raise UsageError(f"sequence {number} does not run: fork it after its first token and before its last")
        origin = self._running[slot]
        sampling = sampling or origin.sampling
        if len(origin.tokens) >= sampling.max_new_tokens:
            raise UsageError(f"sequence {number} has {len(origin.tokens)} tokens already: allow its fork more")
        if self._reading is not None and self.slots.free_slots < 2:
            # The last free slot is where the sequence that is being read will sit.
            raise PoolExhaustedError("slot", 1, self.slots.free_slots - 1, self.slots.slots, "max_batch")
        other = self.slots.fork(slot, self._room(len(origin.prompt), sampling))
        ends = origin.stop_ids if sampling.stop_ids is None else frozenset(sampling.stop_ids)
        self._count += 1
        draws, tokens = Draws(sampling.seed, place), list(origin.tokens)
        self._running[other] = Request(
            self._count, origin.prompt, sampling, draws, ends, tokens, origin.written, unread=origin.unread
        )
        return self._count

    def abort(self, number: int) -> bool:
        """End a sequence now; False when it is over already. The next ``step`` tells its end."""
        found = next((request for request in self.requests if request.number == number), None)
        if found is None:
            return False
        if found is self._reading:
            self._reading = None
            self.slots.abandon()
        elif found in self._waiting:
            self._waiting.remove(found)
        else:
            self._leave(found)
        found.finish = "aborted"
        self._aborted.append(Event(number, None, "aborted"))
        return True

    def step(self) -> list[Event]:
        """A token (or several) for every running sequence, and some of a prompt for the next; what became of it."""
        events, self._aborted = self._aborted, []
        events += self._decode()
        events += self._prefill()
        return events

    def _decode(self) -> list[Event]:
        if not self._running:
            return []
        self._compact()
        rows, running = self._bucket(), dict(sorted(self._running.items()))
        caches = self.slots.first(rows)
        made = None
        if self.speculation is not None:
            made = self.speculation.round(rows, running, caches, self.context)
        if made is not None:
            return self._take_several(made, running)
        started = perf_counter()
        step = self._programs.step(rows, 1, caches)
        ids, lengths = [[0] for _ in range(rows)], [0] * rows
        for slot, request in running.items():
            ids[slot], lengths[slot] = [request.tokens[-1]], request.written
        logits = step(ids, lengths)
        if self.speculation is not None and self.speculation.following:
            logits = logits.clone()  # results of a step hold until the next one
            self.speculation.stepped(rows, running)
        for request in running.values():
            request.written += 1
        self.slots.step(running)
        events = self._take(logits[list(running)], list(running.values()))
        if self.speculation is not None:
            self.speculation.plain(len(running), perf_counter() - started)
        return events

    def _take_several(self, made: Mapping[int, list[int]], running: Mapping[int, Request]) -> list[Event]:
        """Hand out the tokens of a round, of each sequence up to its end."""
        events: list[Event] = []
        for slot, request in running.items():
            for token in made[slot]:
                request.written += 1
                self.slots.step([slot])
                request.take(token, self.context)
                self.made += 1
                events.append(Event(request.number, token, request.finish))
                if request.finish is not None:
                    self._leave(request)
                    break
        return events

    def _prefill(self) -> list[Event]:
        budget = self._budget
        events: list[Event] = []
        while budget > 0:
            if self._reading is None and not self._begin():
                break
            request = self._reading
            assert request is not None
            size = self.pieces(request.pending)[0]
            if size > budget and budget < self._budget:  # it would be more than that in this step
                break
            step = self._programs.step(1, size, self.slots.staging)
            piece = list(request.prompt[request.written : request.written + size])
            logits = step([piece], [request.written])
            if self.speculation is not None and self.speculation.following:
                logits = logits.clone()
                self.speculation.read(request, size)
            request.written += size
            self.slots.read(size)
            self.read += size
            budget -= size
            if not request.pending:
                self._reading, self._running[self.slots.seat()] = None, request
                events += self._take(logits, [request])
        return events

    def _begin(self) -> bool:
        """Begin to read the first that waits; False where nobody does, or there is no room for it yet."""
        if not self._waiting or not self.slots.free_slots:
            return False
        request = self._waiting[0]
        try:
            self.slots.begin(self._room(len(request.prompt), request.sampling))
        except PoolExhaustedError:
            return False
        self._reading = self._waiting.popleft()
        return True

    def _room(self, prompt: int, sampling: Sampling) -> int:
        """The tokens that a sequence may come to have in the caches, drafts included; the last new one is never
        written."""
        drafts = 0 if self.speculation is None else self.speculation.drafts
        return min(self.context, prompt + sampling.max_new_tokens - 1 + drafts)

    def pieces(self, tokens: int) -> list[int]:
        """The sizes in which that many tokens of a prompt are read, in order."""
        sizes: list[int] = []
        for size in self.chunks:
            sizes += [size] * (tokens // size)
            tokens %= size
        return sizes

    def _take(self, logits: Tensor, requests: list[Request]) -> list[Event]:
        chosen = self._choose(
            logits, [request.sampling for request in requests], [request.draws for request in requests]
        )
        self.made += len(requests)
        for request, token in zip(requests, chosen, strict=True):
            request.take(token, self.context)
            if request.finish is not None:
                self._leave(request)
        return [Event(request.number, request.tokens[-1], request.finish) for request in requests]

    def _leave(self, request: Request) -> None:
        slot = next(slot for slot, running in self._running.items() if running is request)
        del self._running[slot]
        self.slots.free(slot)

    def _bucket(self, highest: int | None = None) -> int:
        needed = max(self._running) + 1 if highest is None else highest
        return next(size for size in self.batches if size >= needed)

    def _compact(self) -> None:
        """Move sequences to lower slots where a smaller program can then take the step."""
        while self._bucket(len(self._running)) < self._bucket():
            slot = max(self._running)
            request = self._running.pop(slot)
            self._running[self.slots.lower(slot)] = request


def buckets(largest: int) -> tuple[int, ...]:
    """The batch sizes for which there are programs: powers of two, and the largest batch."""
    sizes = {1 << power for power in range(largest.bit_length()) if 1 << power <= largest}
    return tuple(sorted({*sizes, largest}))
