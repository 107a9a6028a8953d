"""Keys as documents: canonical JSON, its SHA-256, and in what two of them differ."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

Components = dict[str, Any]
"""The named components of a key, plain JSON values."""

_ABSENT = "absent"


def canonical(document: Any) -> str:
    """The text that every process writes for equal documents: sorted keys, no spaces. TypeError for what is no JSON."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(components: Components) -> str:
    """SHA-256 of the canonical text."""
    return hashlib.sha256(canonical(components).encode()).hexdigest()


def differences(stored: Any, asked: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(component, stored value, value asked for) of every leaf in which two documents differ.

    A component is named by its path, such as ``flags.seed`` or ``model.tensors.lm_head.weight``.
    """
    if isinstance(stored, dict) and isinstance(asked, dict):
        for name in sorted({*stored, *asked}):
            inner = f"{place}.{name}" if place else str(name)
            yield from differences(stored.get(name, _ABSENT), asked.get(name, _ABSENT), inner)
    elif canonical(stored) != canonical(asked):
        yield place, stored, asked
