"""What a family of models in this package offers to the capture of its models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class ModelFamily:
    """Functions of one model type; ``config`` is its own configuration class.

    ``configure(data, overrides)`` checks the JSON object of a ``config.json`` with (FIELD, VALUE) texts set over it;
    ``build(config, device)`` makes the module, uninitialised, on any device including meta; ``initialize(module, seed,
    device)`` gives it seeded weights and ``load_weights(module, directory, device)`` those of a checkpoint, in place;
    ``new_cache(config, batch, context, dtype, device)`` makes its zeroed caches. The module's forward takes
    (input_ids, lengths, cache) and updates the cache in place.
    """

    model_type: str
    configure: Callable[..., Any]
    build: Callable[..., nn.Module]
    initialize: Callable[..., nn.Module]
    load_weights: Callable[..., nn.Module]
    new_cache: Callable[..., dict[str, Tensor]]
