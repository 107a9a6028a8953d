"""``kimigraph.Generator``: a directory with a model to tokens, prompt by prompt or many at a time."""

import copy
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Generator as Generating
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimigraph.adapters.transformers_tokenizer import Tokenizer, load_tokenizer
from kimigraph.capture import ModelSource, load_source
from kimigraph.capture.source import StepPart, stop_ids, vocabulary_size
from kimigraph.compiler import compile_model
from kimigraph.ir.config import CompileConfig, Phase
from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.report import CompileReport
from kimigraph.passes.sharding.plan import require_divisible
from kimigraph.replay_program import new_replay_log
from kimigraph.run import seeded
from kimigraph.runtime.executor import Executor, device_of
from kimigraph.runtime.generation import (
    BoundStep,
    Completion,
    Engine,
    Event,
    PagedSlots,
    Pool,
    Row,
    Sampling,
    SlotCaches,
    Slots,
    Step,
    TextStream,
)
from kimigraph.runtime.generation.sampling import choose
from kimigraph.runtime.generation.stage_step import PipelinedStep, pipelined_step
from kimigraph.runtime.graphs import graph_mode
from kimigraph.runtime.parallel import first_then_others, join_ranks
from kimigraph.runtime.parallel.stage_links import GroupLinks
from kimigraph.runtime.parallel.stages import chosen_by_last, require_agreement, stage_number
from kimigraph.runtime.prepared import PreparedWeights
from kimigraph.runtime.speculation import (
    Draft,
    HeadDraft,
    HeadSteps,
    ModelDraft,
    NgramDraft,
    ReplayLog,
    Speculation,
    StateShape,
    Verify,
)
from kimigraph.sequence_caches import OWN_HEAD, cache_rows, of_stage, paged_caches, state_shape, with_draft_head
from kimigraph.session import resolve_target
from kimigraph.state_logs import log_length, log_rows
from kimigraph.weights import Watch, drawn_weight, layout_of, read_weights, unwatched

DRAFT_TOKENS = 4
"""Drafts of a step at most, where nobody says."""
CHUNKS = (512, 64, 8)
"""Sizes of the pieces in which prompts are read; what is left over goes token by token."""

Prompt = str | Sequence[int]


class StepPrograms:
    """The compiled steps of one model: made when first asked for, over one set of weights.

    ``reports`` has one compile report for each (batch, tokens); ``verifying`` are those of steps that verify drafts,
    ``head`` those of the layer that makes some from hidden states, which ``part`` has the steps give.
    """

    part: StepPart = "step"

    def __init__(self, source: str, config: CompileConfig, notify: Callable[[str], None], watch: Watch) -> None:
        self.target = resolve_target(config.target)
        self.rank = join_ranks(config.mesh, self.target)
        stage = stage_number(config.pp)
        self.source, self.config = source, replace(config, report=False, verify=False, stage=stage)
        self._links = GroupLinks() if config.pp > 1 else None
        self.reports: dict[tuple[int, int], CompileReport] = {}
        self._notify, self._watch = notify, watch
        self._graphs = graph_mode(self.target, config.max_graphs, reuse_outputs=True) if config.cuda_graph else None
        self._weights = dict[str, Tensor]()
        self._prepared = PreparedWeights(self._weights)
        self._executors: dict[tuple[int, int], Executor] = {}
        self._steps: dict[tuple[int, ...], BoundStep] = {}
        self._pipelined: dict[tuple[int, ...], PipelinedStep] = {}
        self._phase: Phase | None = None
        self._scratch = Path(tempfile.mkdtemp(prefix="kimigraph-generate-"))
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)

    @cached_property
    def device(self) -> torch.device:
        """Where steps run. What another machine will run can be compiled without it."""
        return device_of(self.target)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The model's own weights by outside name, as far as a program has asked for them."""
        return self._weights

    @cached_property
    def verifying(self) -> "StepPrograms":
        """The steps that verify drafts, over the same weights."""
        return self._beside("verify", _phase="verify")

    @cached_property
    def head(self) -> "StepPrograms":
        """The steps of the layer that guesses further tokens, over the same weights."""
        return self._beside("head", part="draft_head")

    def _beside(self, name: str, **changes: Any) -> "StepPrograms":
        other = copy.copy(self)
        scratch = self._scratch / name
        scratch.mkdir()
        for cached in ("verifying", "head"):
            vars(other).pop(cached, None)
        vars(other).update(reports={}, _executors={}, _steps={}, _scratch=scratch, **changes)
        return other

    def settle(self, **changes: Any) -> None:
        """Change the configuration of these steps and of those beside them."""
        self.config = replace(self.config, **changes)
        for other in self._others():
            other.settle(**changes)

    def _others(self) -> list["StepPrograms"]:
        return [vars(self)[name] for name in ("verifying", "head") if name in vars(self)]

    def all_reports(self) -> list[CompileReport]:
        """Those of all programs so far, in whatever form."""
        return [*self.reports.values(), *(report for other in self._others() for report in other.all_reports())]

    def verify(self, batch: int, tokens: int, caches: Mapping[str, Tensor]) -> Verify:
        """The step of ``batch`` rows by ``tokens`` tokens that writes no recurrent state: logits [B, S, V] of all."""
        return self.verifying.bound(batch, tokens, caches).all_logits

    def replay_log(self, shape: StateShape, rows: int, tokens: int) -> ReplayLog:
        """Recurrent states of ``rows`` sequences, and a log of ``tokens`` tokens each, folded by a compiled program."""
        return new_replay_log(shape, rows, tokens, self.target, self.device, self._scratch, self._graphs)

    def model(self, batch: int, tokens: int) -> ModelSource:
        """The source of the step of ``batch`` rows by ``tokens`` tokens."""
        return load_source(self.source, self.shaped(batch, tokens), rows=True, part=self.part)

    def shaped(self, batch: int, tokens: int) -> CompileConfig:
        """The configuration of that step."""
        phase = self._phase or ("decode" if tokens == 1 else "prefill")
        length = self.config.state_log if phase == "decode" else 1
        return replace(self.config, phase=phase, batch=batch, tokens=tokens, state_log=length)

    def step(self, batch: int, tokens: int, caches: Mapping[str, Tensor]) -> Step:
        """The step over ``caches``, which are those of an earlier call with the same shape or lie elsewhere."""
        if self._links is None:
            return self.bound(batch, tokens, caches)
        place = _place(batch, tokens, caches)
        if place not in self._pipelined:
            parts = self.config.micro_batches if tokens == 1 else 1
            self._pipelined[place] = pipelined_step(self.executor, batch, tokens, caches, self._links, parts)
        return self._pipelined[place]

    def bound(self, batch: int, tokens: int, caches: Mapping[str, Tensor]) -> BoundStep:
        """The same as one program of all layers."""
        place = _place(batch, tokens, caches)
        if place not in self._steps:
            self._steps[place] = BoundStep(self.executor(batch, tokens), caches)
        return self._steps[place]

    def artifact(self, batch: int, tokens: int) -> Path:
        """Where the compiled step of that shape lies, once it has been asked for."""
        return self._scratch / f"b{batch}-t{tokens}"

    def executor(self, batch: int, tokens: int) -> Executor:
        """The program of that step, bound to the weights."""
        key = (batch, tokens)
        if key not in self._executors:
            model, directory = self.model(*key), self.artifact(batch, tokens)
            self.reports[key], manifest = self._compiled(model, self.shaped(*key), directory)
            self._notify("binding weights")
            self._bring(manifest, model)
            self._executors[key] = Executor(directory, self._weights, self._prepared)
            if self._graphs is not None and (tokens == 1 or self._phase is not None):
                self._graphs.adopt(self._executors[key])
        return self._executors[key]

    def _compiled(self, model: ModelSource, config: CompileConfig, directory: Path) -> tuple[CompileReport, Manifest]:
        """The program in ``directory``. Of several ranks the first compiles, and the others take it from the cache."""

        def compiled() -> tuple[CompileReport, Manifest]:
            cached = replace(config, cache="use") if self.rank and config.cache == "refresh" else config
            report = compile_model(self.source, model, cached, directory, self._notify)
            return report, Manifest.read(directory)

        mode = ", in graph mode" if config.cuda_graph else ""  # ranks capture the same steps, or none does
        made = first_then_others(config.mesh.ways, self.rank, compiled, lambda made: made[1].identity() + mode)
        if config.pp > 1:
            require_agreement(made[1])
        return made

    def _bring(self, manifest: Manifest, model: ModelSource) -> None:
        """Put the tensors that the program binds, and no earlier one did, on its device."""
        wanted = manifest.wanted(self._weights.keys())
        lacking = [spec for spec in wanted if spec.kind != "constant" and spec.source not in self._weights]
        weights = [spec for spec in lacking if spec.kind == "weight"]
        if manifest.random_weights:
            asked = model.document.get("random_weights") or {}
            for done, spec in enumerate(weights):
                self._watch(done, len(weights))
                if asked.get("on_device") and self.device.type != "cpu":
                    self._weights[spec.source] = drawn_weight(spec, model.weight_seed or 0, self.device, self.rank)
                else:
                    self._weights[spec.source] = seeded(spec, manifest, self.rank).to(self.device)
        elif weights:
            layout = layout_of(str(manifest.info.get("model_type", "")))
            packed = manifest.packed_weights()
            self._weights |= read_weights(
                Path(self.source), weights, layout, self.device, self._watch, packed, self.rank
            )
        buffers = [spec for spec in lacking if spec.kind != "weight"]
        if buffers:  # integers that a checkpoint holds: the model itself knows how they are stored
            state = model.loaded.module.state_dict()
            for spec in buffers:
                self._weights[spec.source] = state[model.hints.prefix + spec.source].to(self.device)


def _place(batch: int, tokens: int, caches: Mapping[str, Tensor]) -> tuple[int, ...]:
    """What tells one step from another: of paged caches the first is one for all, and the last their own table."""
    tensors = list(caches.values())
    return batch, tokens, tensors[0].data_ptr(), tensors[-1].data_ptr()


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
        slots = self._slots(model, max_batch, debug, {} if log is None else log.states, logged)
        stages = self.programs.config.pp
        self.speculation: Speculation | None = None
        if draft is not None:
            chosen = self._draft(draft, slots, draft_tokens, notify) if isinstance(draft, str | Path) else draft
            self.speculation = Speculation(self.programs, chosen, draft_tokens, log)
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

    def _draft(self, draft: str | Path, slots: Slots, tokens: int, notify: Callable[[str], None]) -> Draft:
        """The draft of that name; UsageError for a model of another vocabulary."""
        rows = slots.slots
        if str(draft) == "ngram":
            return NgramDraft()
        if str(draft) == OWN_HEAD:
            own, head = self.programs, self.programs.head
            steps = HeadSteps(own.bound, own.verifying.bound, head.bound, head.verifying.bound)
            return HeadDraft(steps, slots, tokens, self.context)
        config = replace(self.programs.config, context=self.context, cache_layout="model", overrides=())
        programs = StepPrograms(str(draft), config, notify, unwatched)
        model = programs.model(1, 1)
        if vocabulary_size(model.document) != self.vocabulary:
            raise UsageError(
                f"the draft {draft} has {vocabulary_size(model.document)} tokens, {self.programs.source} has "
                f"{self.vocabulary}: drafts need a model of the same vocabulary, or --draft ngram"
            )
        require_divisible(model.document, config.tp)
        shape = state_shape(model)
        programs.verifying.model(rows, 1 + tokens)
        log = None if shape is None else programs.replay_log(shape.of_rank(config.tp), rows, 1 + tokens)
        slots = SlotCaches(
            cache_rows(model, config.tp, config.sp), rows, programs.device, {} if log is None else log.states
        )
        return ModelDraft(programs, slots, log, 1 + tokens, self.context)

    def _slots(
        self,
        model: ModelSource,
        max_batch: int,
        debug: bool,
        given: Mapping[str, Tensor],
        logged: Mapping[str, Row],
    ) -> Slots:
        config, device = self.programs.config, self.programs.device
        rows = cache_rows(model, config.tp, 1 if config.cache_layout == "paged" else config.sp)
        rows = (rows if config.pp == 1 else of_stage(rows, config)) | dict(logged)
        paged = paged_caches(model, config.page_size) if config.cache_layout == "paged" else {}
        paged = {name: form for name, form in paged.items() if name in rows}
        if not paged:
            return SlotCaches(rows, max_batch, device, given)
        pages = config.pages or (max_batch + 1) * -(-self.context // config.page_tokens)
        self.programs.settle(pages=pages)
        pool = Pool(paged, pages, self.context, debug, config.sp)
        unpaged = {name: row for name, row in rows.items() if name not in paged}
        return PagedSlots(unpaged, pool, max_batch, device, given)

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
