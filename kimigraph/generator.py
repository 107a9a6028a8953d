"""``kimigraph.Generator``: a directory with a model to tokens, prompt by prompt or many at a time."""

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Generator as Generating
from dataclasses import replace
from pathlib import Path
from typing import Any

from kimigraph.adapters.transformers_tokenizer import Tokenizer, load_tokenizer
from kimigraph.capture.source import stop_ids, vocabulary_size
from kimigraph.drafts import named_draft
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.passes.sharding.plan import require_divisible
from kimigraph.runtime.generation import Completion, Engine, Event, Sampling, TextStream
from kimigraph.runtime.generation.sampling import choose
from kimigraph.runtime.parallel.stages import chosen_by_last
from kimigraph.runtime.speculation import Draft, Speculation
from kimigraph.sequence_caches import OWN_HEAD, new_slots, state_shape, with_draft_head
from kimigraph.state_logs import log_length, log_rows
from kimigraph.step_programs import StepPrograms
from kimigraph.weights import Watch, unwatched

DRAFT_TOKENS = 4
"""Drafts of a step at most, where nobody says."""
CHUNKS = (2048, 512, 64, 8)
"""Sizes of the pieces in which prompts are read; what is left over goes token by token."""

Prompt = str | Sequence[int]


class Generator:
    """Tokens from the model in a directory. See ``docs/generate.md``.

    ``config`` says what ``kimigraph compile`` says: target, context (the most tokens of one sequence), dtype, options
    of the compiler. ``max_batch`` sequences run at once; more wait. Programs are for
    ``batches`` (default: powers of two up to ``max_batch``). Prompts are read in pieces of the sizes ``chunks``.
    With ``cache_layout`` paged, latents and index keys lie in ``pages`` pages that all sequences share (default: what
    ``max_batch`` sequences of full length and the one being read take); ``debug`` fills free pages with NaN.
    ``draft`` (``ngram``, ``mtp``, the directory of a smaller model of the same vocabulary, or an object) guesses up to
    ``draft_tokens`` tokens a step, which are verified together; see ``docs/speculation.md``. Without one, recurrent
    states are written with every ``state_log``-th token (None: as the cost model says).
    Programs come from the compile cache, or are compiled when they are first needed; ``notify`` is told what goes on,
    ``watch`` how much of the weights has been read.

    Raises UsageError for a source that cannot generate, and what compilation raises.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        config: CompileConfig | None = None,
        max_batch: int = 8,
        batches: Sequence[int] | None = None,
        chunks: Sequence[int] = CHUNKS,
        max_waiting: int | None = None,
        debug: bool = False,
        draft: str | Path | Draft | None = None,
        draft_tokens: int = DRAFT_TOKENS,
        state_log: int | None = None,
        notify: Callable[[str], None] = lambda message: None,
        watch: Watch = unwatched,
    ) -> None:
        if max_batch < 1 or any(size < 1 for size in chunks):
            raise UsageError(f"max_batch {max_batch} and chunks {tuple(chunks)} must be at least 1")
        if draft is not None and draft_tokens < 1:
            raise UsageError(f"draft_tokens is {draft_tokens}: give at least 1")
        self.programs = StepPrograms(str(source), config or CompileConfig(), notify, watch)
        own_head = draft is not None and str(draft) == OWN_HEAD
        if own_head:
            self.programs.part = "step_with_hidden"
        model = self.programs.model(1, 1)
        assert model.shape is not None
        self.context = model.shape.context
        require_divisible(model.document, self.programs.config.tp)
        self.vocabulary = vocabulary_size(model.document)
        shape, log = state_shape(model, asked=draft is not None or state_log is not None), None
        length = log_length(state_log, shape, max_batch, self.programs.config, self.programs.target, draft is not None)
        self.programs.settle(state_log=length)
        if shape is not None and draft is not None:
            log = self.programs.replay_log(shape.of_rank(self.programs.config.tp), max_batch, 1 + draft_tokens)
        logged = {} if shape is None else log_rows(shape, length)
        if draft is not None:
            self.programs.verifying.model(max_batch, 1 + draft_tokens)  # which has the reason where there is none
        if own_head:
            model = with_draft_head(model, self.programs.head.model(1, 1), 1 + draft_tokens)
        states = {} if log is None else log.states
        slots = new_slots(self.programs, model, self.context, max_batch, states, logged, debug)
        stages = self.programs.config.pp
        self.speculation: Speculation | None = None
        if draft is not None:
            if isinstance(draft, str | Path):
                draft = named_draft(str(draft), self.programs, slots, self.vocabulary, self.context, draft_tokens)
            self.speculation = Speculation(self.programs, draft, draft_tokens, log)
        self.engine = Engine(
            self.programs,
            slots,
            self.context,
            batches=batches,
            chunks=chunks,
            max_waiting=max_waiting,
            speculation=self.speculation,
            choose=choose if stages == 1 else chosen_by_last(choose, stages, self.programs.device),
        )
        self.tokenizer: Tokenizer | None = load_tokenizer(Path(source))
        self.stop_ids = stop_ids(Path(source), None if self.tokenizer is None else self.tokenizer.end)

    def encode(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt: text through the model's tokenizer, ids as they are.

        UsageError for text without a tokenizer, and for ids that the model does not have.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError(
                    f"{self.programs.source} has no tokenizer that can be read here (its files, and transformers: pip "
                    "install 'kimigraph[hf]'): give token ids instead of text"
                )
            return self.tokenizer.encode(prompt)
        wrong = [token for token in prompt if not 0 <= token < self.vocabulary]
        if wrong:
            raise UsageError(f"token {wrong[0]} is not in the vocabulary: ids go from 0 to {self.vocabulary - 1}")
        return list(prompt)

    def submit(self, prompt: Prompt, sampling: Sampling | None = None, place: int = 0) -> int:
        """A new sequence, which joins the running ones as soon as there is room; its number. See ``Engine.submit``."""
        return self.engine.submit(self.encode(prompt), sampling or Sampling(), place, self.stop_ids)

    def step(self) -> list[Event]:
        """One more token for every running sequence; see ``Engine.step``."""
        return self.engine.step()

    def fork(self, number: int, sampling: Sampling | None = None, place: int = 0) -> int:
        """A second sequence that goes on from where a running one is; see ``Engine.fork``."""
        return self.engine.fork(number, sampling, place)

    def abort(self, number: int) -> bool:
        """End a sequence now; False when it is over already."""
        return self.engine.abort(number)

    def stream(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> Generating[Event]:
        """Events of ``prompts`` as they come, ``number`` being the place in the list. All start together.

        Sequences submitted before go on beside them; their events are not told. A stream that is closed early ends its
        sequences.
        """
        samplings = _one_each(sampling or Sampling(), len(prompts))
        encoded = [self.encode(prompt) for prompt in prompts]
        places: dict[int, int] = {}
        try:
            for place, (ids, each) in enumerate(zip(encoded, samplings, strict=True)):
                places[self.engine.submit(ids, each, place, self.stop_ids)] = place
            while places:
                for event in self.engine.step():
                    place = places.get(event.number)
                    if place is not None:
                        if event.finish is not None:
                            del places[event.number]
                        yield replace(event, number=place)
        finally:
            for number in places:
                self.engine.abort(number)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> list[Completion]:
        """The completions of ``prompts``, in their order, all run together. ``sampling``: one for all, or one each."""
        made: list[list[int]] = [[] for _ in prompts]
        ends: dict[int, Any] = {}
        for event in self.stream(prompts, sampling):
            if event.token is not None:
                made[event.number].append(event.token)
            if event.finish is not None:
                ends[event.number] = event.finish
        return [
            Completion(tuple(self.encode(prompt)), tuple(tokens), ends[place], self.text(tokens))
            for place, (prompt, tokens) in enumerate(zip(prompts, made, strict=True))
        ]

    def text(self, tokens: Sequence[int]) -> str | None:
        """The text of tokens; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.decode(list(tokens))

    def text_stream(self) -> TextStream | None:
        """Turns the tokens of one sequence into text as they come; None without a tokenizer."""
        return None if self.tokenizer is None else TextStream(self.tokenizer.decode)

    def prepare(self, lengths: Iterable[int] | None = None) -> None:
        """Compile and bind now what would be when it is first needed: for all batches, and prompts of these lengths
        (None: of any length)."""
        for batch in self.engine.batches:
            self.programs.step(batch, 1, self.engine.slots.first(batch))
            if self.speculation is not None:
                self.speculation.prepare(batch, self.engine.slots.first(batch))
        sizes = self.engine.chunks if lengths is None else {x for n in lengths for x in self.engine.pieces(n)}
        for size in sorted(sizes):
            self.programs.step(1, size, self.engine.slots.staging)
            if self.speculation is not None:
                self.speculation.prepare_reading(size)


def _one_each(sampling: Sampling | Sequence[Sampling], count: int) -> list[Sampling]:
    if isinstance(sampling, Sampling):
        return [sampling] * count
    if len(sampling) != count:
        raise UsageError(f"{len(sampling)} samplings for {count} prompts: give one for all, or one for each")
    return list(sampling)
