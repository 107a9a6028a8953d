"""Front end: a SOURCE becomes a captured program."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimigraph.capture.capture_source import capture
    from kimigraph.capture.hints import CaptureHints, InputHint
    from kimigraph.capture.load import MODEL_TYPES, load_source
    from kimigraph.capture.program import capture_module
    from kimigraph.capture.source import ModelSource

__all__ = [
    "MODEL_TYPES",
    "CaptureHints",
    "InputHint",
    "ModelSource",
    "capture",
    "capture_module",
    "load_source",
]

_HOMES = {
    "MODEL_TYPES": "load",
    "CaptureHints": "hints",
    "InputHint": "hints",
    "ModelSource": "source",
    "capture": "capture_source",
    "capture_module": "program",
    "load_source": "load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
