"""A resolved source to a captured program."""

from dataclasses import replace
from typing import Any

from kimigraph.capture.program import capture_module
from kimigraph.capture.source import ModelSource
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram


def capture(source: ModelSource, config: CompileConfig, weights: bool = True) -> CapturedProgram:
    """Capture one step of ``source``; errors as in ``capture_module``.

    Without ``weights`` those of a model directory are neither read nor seeded: ``tensors`` holds memory for them alone.
    ``info`` records the source, model type, shape and notes for people (such as a top-k larger than the context).
    """
    loaded = source.loaded if weights else source.outline
    args, kwargs = loaded.arguments(None)
    program = capture_module(loaded.module, args, kwargs, replace(config, phase=source.phase), source.hints)
    shape: dict[str, Any] = {}
    if source.shape is not None:
        shape = {"batch": source.shape.batch, "tokens": source.shape.tokens, "context": source.shape.context}
    program.info.update(
        source=source.name,
        model_type=source.model_type,
        shape_key=source.shape_key,
        random_weights=source.random_weights,
        weight_seed=source.weight_seed,
        notes=[*source.notes, *_unmarked(config, source)],
        **shape,
    )
    return program


def _unmarked(config: CompileConfig, source: ModelSource) -> list[str]:
    if config.marks or source.phase == "decode":
        return []
    return ["captured without marks: unmarked chunked delta rules and their convolutions stay ATen"]
