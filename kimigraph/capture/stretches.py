"""A step of which each rank takes a stretch of the new tokens, captured as the step of one stretch."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from kimigraph.capture.source import Arguments, Loaded, ModelSource
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.policy import policy_of

STRETCH = "stretch"
"""The key of ``CapturedProgram.info`` with the tokens of a rank's stretch; ``share-tokens`` makes the step of all."""
LENGTHS = "lengths"


def stretch_of(source: ModelSource, config: CompileConfig, least_tokens: int) -> ModelSource | None:
    """The step of one of ``sp`` stretches of a prefill's tokens, None where ranks do not take stretches.

    They do from ``least_tokens`` on that they divide, in models that take the lengths of sequences as an input, where
    caches are not quantised: rows of bytes are not put together from several ranks.
    """
    shape, ways, policy = source.shape, config.sp, policy_of(config.policy)
    if ways == 1 or config.pp > 1 or source.phase != "prefill" or shape is None:
        return None
    if policy.latent.quantises or policy.index_key.quantises:
        return None
    named = any(item.name == LENGTHS for item in source.inputs)
    if not named or shape.tokens % ways or shape.tokens < least_tokens:
        return None
    tokens = shape.tokens // ways

    def cut(value: Any) -> Any:
        whole = isinstance(value, Tensor) and tuple(value.shape) == (shape.batch, shape.tokens)
        return value[:, :tokens].clone() if whole else value

    def load(device: str) -> Loaded:
        loaded = source.load(device)

        def arguments(length: int | None) -> Arguments:
            return pytree.tree_map(cut, loaded.arguments(length))

        return Loaded(loaded.module, arguments)

    return replace(source, load=load)
