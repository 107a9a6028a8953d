"""Dataclasses from JSON objects, each field checked."""

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from kimigraph.ir.errors import UsageError


def override(data: dict[str, Any], path: str, text: str) -> None:
    """Set the field at ``path`` (dots lead into objects) of ``data``; ``text`` is JSON, else plain text."""
    *parents, leaf = path.split(".")
    for parent in parents:
        inner = data.get(parent)
        if not isinstance(inner, dict):
            raise UsageError(f"--set {path}={text}: the configuration has no object {parent!r}")
        data = cast(dict[str, Any], inner)
    try:
        data[leaf] = json.loads(text)
    except ValueError:
        data[leaf] = text


@dataclass(frozen=True)
class FieldReader:
    """Builds dataclasses from the configuration of ``model_type``; fields in ``ignored`` are left out."""

    model_type: str
    ignored: Collection[str] = ()

    def build(self, cls: type[Any], data: Mapping[str, Any], place: str = "") -> Any:
        """An instance of ``cls``; ``place`` prefixes field names in messages. UsageError for what does not fit."""
        hints = get_type_hints(cls)
        for name in data:
            if name not in hints and name not in self.ignored and not name.startswith("_"):
                close = difflib.get_close_matches(name, hints, n=1)
                hint = f"did you mean {close[0]!r}?" if close else "remove it, or use a model type that has it"
                raise UsageError(f"config.json: {self.model_type} has no field {place + name!r}; {hint}")
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in data]
        if missing:
            raise UsageError(
                f"config.json: field {place + missing[0]!r} is missing; {self.model_type} has no default for it"
            )
        return cls(**{name: self._convert(data[name], hints[name], place + name) for name in hints if name in data})

    def _convert(self, value: Any, hint: Any, place: str) -> Any:
        """The JSON value as the annotated type, or UsageError."""
        origin, choices = get_origin(hint), get_args(hint)
        if is_dataclass(hint) and isinstance(value, dict):
            return self.build(cast(type[Any], hint), cast(dict[str, Any], value), f"{place}.")
        if origin is Literal:
            if any(value == choice and type(value) is type(choice) for choice in choices):
                return value
            raise UsageError(f"config.json: {place} is {value!r}; supported: {', '.join(map(repr, choices))}")
        if origin in (Union, UnionType):
            return None if value is None else self._convert(value, choices[0], place)
        if origin is tuple and isinstance(value, list):
            return tuple(self._convert(item, int, place) for item in cast(list[Any], value))
        if origin is dict and isinstance(value, dict):
            return cast(dict[str, Any], value)
        if hint is float and type(value) in (int, float):
            return float(value)
        if hint in (int, bool, str) and type(value) is hint:
            return value
        wanted = "an object" if origin is dict or is_dataclass(hint) else getattr(hint, "__name__", str(hint))
        wanted = "a list of int" if origin is tuple else wanted
        raise UsageError(f"config.json: {place} is {value!r}; it takes {wanted}")
