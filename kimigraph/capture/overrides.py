"""``--set FIELD=VALUE`` on a ``config.json``."""

import copy
import difflib
import json
from typing import Any

from kimigraph.ir.errors import UsageError


def apply_overrides(
    document: dict[str, Any], overrides: tuple[tuple[str, str], ...], known: set[str], part: str | None = None
) -> dict[str, Any]:
    """A copy of ``document`` with the fields set. A dotted field reaches into a nested object.

    ``known`` are the fields that the model type has beside those written in the file; with ``part`` a field that the
    document lacks belongs to that nested object. A list with one entry a layer (``layer_types``) is cut, or repeated
    from its start, when the number of layers changes; one of layers' numbers (``kda_layers``) is cut. Raises UsageError
    for an unknown field, with the nearest known.
    """
    result = copy.deepcopy(document)
    for name, text in overrides:
        *path, leaf = name.split(".")
        target = result if path or name in result or part not in result else result[part]
        for step in path:
            if not isinstance(target.get(step), dict):
                raise UsageError(f"--set {name}={text}: the configuration has no part {step!r}")
            target = target[step]
        if leaf not in target and leaf not in known:
            close = difflib.get_close_matches(leaf, sorted({*target, *known}), n=1)
            hint = f"did you mean {close[0]!r}?" if close else "the model type has no such field"
            raise UsageError(f"--set {name}={text}: unknown field {leaf!r}; {hint}")
        value = _value(text)
        if leaf == "num_hidden_layers" and isinstance(value, int):
            _refit_layers(target, value)
        target[leaf] = value
    return result


def _refit_layers(target: dict[str, Any], layers: int) -> None:
    old = target.get("num_hidden_layers")
    for name, entries in target.items():
        if name.endswith("_types") and isinstance(entries, list) and entries and len(entries) == old:
            target[name] = [entries[index % len(entries)] for index in range(layers)]
    numbered = target.get("linear_attn_config")
    if not isinstance(numbered, dict):
        return
    for name in numbered.keys() & {"kda_layers", "full_attn_layers"}:
        numbered[name] = [number for number in numbered[name] if number <= layers]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
