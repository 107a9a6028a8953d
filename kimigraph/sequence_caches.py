"""What a sequence has in the caches of a model, and the room for those of many."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from kimigraph.capture.example import StepInput
from kimigraph.capture.hints import InputHint
from kimigraph.capture.source import ModelSource
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor, parse_descriptor
from kimigraph.ir.errors import UsageError
from kimigraph.ir.stages import holds, layer_spans, layers_of
from kimigraph.passes.sharding.plan import share_of
from kimigraph.passes.sharding.sequence import shared_tokens
from kimigraph.runtime.generation import PagedSlots, Pool, Row, SlotCaches, Slots
from kimigraph.runtime.speculation import UNREAD, StateShape
from kimigraph.step_programs import StepPrograms

OWN_HEAD = "mtp"
"""The name of a draft that is the model's own multi-token-prediction layer."""


def of_stage(rows: dict[str, Row], config: CompileConfig) -> dict[str, Row]:
    """The caches of the stage's layers; UsageError for more stages than layers."""
    span = layer_spans(layers_of([*rows]), config.pp)[config.stage]
    return {name: row for name, row in rows.items() if holds(name, span)}


def cache_rows(model: ModelSource, tp: int = 1, sp: int = 1) -> dict[str, Row]:
    """What one sequence has of each cache of ``model`` on a rank: of its heads on one of ``tp``, of its tokens of
    ``sp``."""
    rows: dict[str, Row] = {}
    tokens = paged_caches(model, 1) if sp > 1 else {}
    for item in model.inputs:
        if item.hint.kind == "cache":
            share = share_of(item.name, item.shape, tp)
            if item.name in tokens:
                share = shared_tokens(item.shape, sp, False, item.name)
            rows[item.name] = Row((item.shape if share is None else share.local(item.shape))[1:], item.dtype)
    return rows


def state_shape(model: ModelSource, asked: bool = True) -> StateShape | None:
    """The recurrent states of ``model``; None where it has none, or, unless ``asked`` for, none of one shape."""
    caches = {item.name: (item.hint.descriptor, item.dtype) for item in model.inputs if item.hint.descriptor}
    try:
        return StateShape.of(caches)
    except UsageError:
        if asked:
            raise
        return None


def paged_caches(model: ModelSource, page_size: int) -> dict[str, LatentDescriptor | IndexKeyDescriptor]:
    """The caches of ``model`` that can lie in pages, as they are then described."""
    found: dict[str, LatentDescriptor | IndexKeyDescriptor] = {}
    for item in model.inputs:
        form = parse_descriptor(item.hint.descriptor) if item.hint.descriptor else None
        if isinstance(form, LatentDescriptor | IndexKeyDescriptor):
            found[item.name] = replace(form, layout="paged", page_size=page_size)
    return found


def with_draft_head(model: ModelSource, head: ModelSource, window: int) -> ModelSource:
    """``model`` with the caches of ``head``, its layer for drafts, and room for ``window`` hidden states of each
    sequence."""
    caches = [item for item in head.inputs if item.hint.kind == "cache"]
    [hidden] = [item for item in head.inputs if item.name == "hidden"]
    waiting = StepInput(UNREAD, (1, window, hidden.shape[-1]), hidden.dtype, InputHint("cache"))
    return replace(model, inputs=(*model.inputs, *caches, waiting))


def new_slots(
    programs: StepPrograms,
    model: ModelSource,
    context: int,
    count: int,
    states: Mapping[str, Tensor],
    logs: Mapping[str, Row],
    debug: bool,
) -> Slots:
    """Caches for ``count`` sequences of up to ``context`` tokens, and for the one being read.

    Recurrent ``states`` may be there already; ``logs`` are what a sequence has beside the model's own caches. Paged
    caches share the configured number of pages, or as many as they all take, which ``programs`` are told.
    """
    config, device = programs.config, programs.device
    rows = cache_rows(model, config.tp, 1 if config.cache_layout == "paged" else config.sp)
    rows = (rows if config.pp == 1 else of_stage(rows, config)) | dict(logs)
    paged = paged_caches(model, config.page_size) if config.cache_layout == "paged" else {}
    paged = {name: form for name, form in paged.items() if name in rows}
    if not paged:
        return SlotCaches(rows, count, device, states)
    pages = config.pages or (count + 1) * -(-context // config.page_tokens)
    programs.settle(pages=pages)
    pool = Pool(paged, pages, context, debug, config.sp)
    unpaged = {name: row for name, row in rows.items() if name not in paged}
    return PagedSlots(unpaged, pool, count, device, states)
