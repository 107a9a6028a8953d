"""Writes tests/project/public_api.expected: the names, parameters and defaults of what users import."""

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import kimigraph
from kimigraph import passes

EXPECTED = Path(__file__).resolve().parents[1] / "tests" / "project" / "public_api.expected"


def lines() -> Iterator[str]:
    """One line for each public name, its parameters, and the public members of classes below it."""
    for home in (kimigraph, passes):
        for name in sorted(home.__all__):
            value: Any = getattr(home, name)
            if inspect.ismodule(value) or isinstance(value, str):
                yield f"{home.__name__}.{name}"
                continue
            yield f"{home.__name__}.{name}{_parameters(value)}"
            if inspect.isclass(value):
                yield from (f"    {member}" for member in _members(value))


def _members(kind: type) -> Iterator[str]:
    for name, member in sorted(vars(kind).items()):
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield name
        elif inspect.isfunction(member) or isinstance(member, classmethod | staticmethod):
            yield f"{name}{_parameters(getattr(kind, name))}"
        elif not is_dataclass(kind):
            yield name


def _parameters(value: Any) -> str:
    if not callable(value):
        return ""
    shown: list[str] = []
    for parameter in inspect.signature(value).parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        plain = isinstance(parameter.default, bool | int | float | str | tuple | None)
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}" if plain else "=..."
        keyword = " (keyword)" if parameter.kind is parameter.KEYWORD_ONLY else ""
        shown.append(f"{star}{parameter.name}{default}{keyword}")
    return f"({', '.join(shown)})"


if __name__ == "__main__":
    EXPECTED.write_text("\n".join(lines()) + "\n", encoding="utf-8")
