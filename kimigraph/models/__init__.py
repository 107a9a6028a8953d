"""Models written here, by the ``model_type`` of their ``config.json``; each is imported when it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

from kimigraph.ir.errors import UsageError

if TYPE_CHECKING:
    from kimigraph.models.family import ModelFamily

_FAMILIES = {"kimi_k31": "kimigraph.models.kimi_k31"}


def model_types() -> tuple[str, ...]:
    """The model types that ``model_family`` knows."""
    return tuple(sorted(_FAMILIES))


def model_family(model_type: str) -> "ModelFamily":
    """The functions of that model type; UsageError, listing the known ones, for another."""
    if model_type not in _FAMILIES:
        raise UsageError(f"model type {model_type!r} is not one of kimigraph's own: {', '.join(model_types())}")
    family: ModelFamily = import_module(_FAMILIES[model_type]).FAMILY
    return family


__all__ = ["model_family", "model_types"]
