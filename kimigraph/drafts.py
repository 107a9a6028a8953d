"""What guesses the further tokens of a generator, by name: n-grams, the model's own head, a smaller model."""

from dataclasses import replace

from kimigraph.capture.source import vocabulary_size
from kimigraph.ir.errors import UsageError
from kimigraph.passes.sharding.plan import require_divisible
from kimigraph.runtime.generation import SlotCaches, Slots
from kimigraph.runtime.speculation import Draft, HeadDraft, HeadSteps, ModelDraft, NgramDraft
from kimigraph.sequence_caches import OWN_HEAD, cache_rows, state_shape
from kimigraph.step_programs import StepPrograms
from kimigraph.weights import unwatched


def named_draft(name: str, own: StepPrograms, slots: Slots, vocabulary: int, context: int, tokens: int) -> Draft:
    """``ngram``, ``mtp`` or the model in a directory: up to ``tokens`` tokens a step for the sequences in ``slots``.

    ``own`` is the model that verifies them. UsageError for a draft of another vocabulary.
    """
    if name == "ngram":
        return NgramDraft()
    if name == OWN_HEAD:
        steps = HeadSteps(own.bound, own.verifying.bound, own.head.bound, own.head.verifying.bound)
        return HeadDraft(steps, slots, tokens, context)
    return _model_draft(name, own, slots.slots, vocabulary, context, tokens)


def _model_draft(source: str, own: StepPrograms, rows: int, vocabulary: int, context: int, tokens: int) -> ModelDraft:
    config = replace(own.config, context=context, cache_layout="model", overrides=())
    programs = StepPrograms(source, config, own.notify, unwatched)
    model = programs.model(1, 1)
    if vocabulary_size(model.document) != vocabulary:
        raise UsageError(
            f"the draft {source} has {vocabulary_size(model.document)} tokens, {own.source} has {vocabulary}: drafts "
            "need a model of the same vocabulary, or --draft ngram"
        )
    require_divisible(model.document, config.tp)
    shape = state_shape(model)
    programs.verifying.model(rows, 1 + tokens)  # which has the reason where there is none
    log = None if shape is None else programs.replay_log(shape.of_rank(config.tp), rows, 1 + tokens)
    given = {} if log is None else log.states
    slots = SlotCaches(cache_rows(model, config.tp, config.sp), rows, programs.device, given)
    return ModelDraft(programs, slots, log, 1 + tokens, context)
