"""The step of half a batch, captured beside the one of the whole."""

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kimigraph.capture.hints import CaptureHints
from kimigraph.capture.program import capture_module
from kimigraph.capture.source import ModelSource
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.halves import mark_waiting
from kimigraph.ir.program import CapturedProgram


def batch_of(program: CapturedProgram) -> int:
    """Rows of the first input that the caller gives; 0 where none has rows."""
    return next((spec.shape[0] for spec in program.inputs if not spec.bound and spec.shape), 0)


def capture_half(source: ModelSource, config: CompileConfig, whole: CapturedProgram) -> CapturedProgram:
    """As ``half_of_call``, for the example step of a source, without weights."""
    args, kwargs = source.outline.arguments(None)
    return half_of_call(source.outline.module, args, kwargs, config, source.hints, whole)


def half_of_call(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: CompileConfig,
    hints: CaptureHints | None,
    whole: CapturedProgram,
) -> CapturedProgram:
    """The call that ``whole`` was captured of, with the first half of the batch's rows; ``interleave-halves`` makes
    the whole step of it. UsageError where the two differ in more than the rows of inputs."""
    batch = batch_of(whole)

    def rows(value: Any) -> Any:
        batched = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch
        return value[: batch // 2].clone() if batched else value

    args, kwargs = pytree.tree_map(rows, (args, kwargs))
    half = capture_module(module, args, kwargs, config, hints)
    _check_inputs(half, whole, batch)
    half.tensors = whole.tensors
    half.info = {**whole.info, **half.info}
    mark_waiting(half, batch // 2)
    return half


def _check_inputs(half: CapturedProgram, whole: CapturedProgram, batch: int) -> None:
    """UsageError unless the inputs of both differ in the rows of the caller's alone."""
    names = [[(spec.name, spec.source, spec.kind) for spec in program.inputs] for program in (half, whole)]
    if names[0] != names[1]:
        raise UsageError("the model makes another step of half the batch, with other inputs")
    for mine, other in zip(half.inputs, whole.inputs, strict=True):
        halved = mine.bound or (mine.shape[:1] == (batch // 2,) and mine.stride == other.stride)
        if not halved or other.shape != (mine.shape if mine.bound else (batch, *mine.shape[1:])):
            raise UsageError(
                f"{mine.source} is {list(mine.shape)} for half the batch and {list(other.shape)} for all "
                "of it, which is no twice as many rows"
            )
