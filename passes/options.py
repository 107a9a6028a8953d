"""The text form of a pass: ``name{option=value option=value}``, with options derived from its dataclass fields."""

import dataclasses
import json
import re
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from kimigraph.ir.errors import UsageError
from kimigraph.passes.base import Pass
from kimigraph.passes.registry import unknown_name

_BARE = re.compile(r'[^\s{},="]+')
_OPTION = re.compile(r'\s*([^\s{},="]+)=("(?:[^"\\]|\\.)*"|[^\s{},="]+)(?=\s|$)')


def print_pass(item: Pass) -> str:
    """The text of a pass; options that have their default value are left out."""
    texts = [
        f"{_dashed(f.name)}={print_value(getattr(item, f.name))}"
        for f in dataclasses.fields(item)
        if repr(getattr(item, f.name)) != repr(_default(f))
    ]
    return item.name + (f"{{{' '.join(texts)}}}" if texts else "")


def parse_pass(pass_class: type[Pass], text: str) -> Pass:
    """The pass that ``text``, what stands between the braces, describes. Raises UsageError."""
    hints = get_type_hints(pass_class)
    known = {_dashed(f.name): f for f in dataclasses.fields(pass_class)}
    values: dict[str, Any] = {}
    for name, value in _split_options(pass_class.name, text):
        if name not in known:
            raise unknown_name(f"pass '{pass_class.name}': option", name, list(known))
        field_name = known[name].name
        if field_name in values:
            raise UsageError(f"pass '{pass_class.name}': option '{name}' is given twice.")
        values[field_name] = parse_value(hints[field_name], value, f"option '{name}' of pass '{pass_class.name}'")
    missing = [name for name, f in known.items() if f.name not in values and _default(f) is dataclasses.MISSING]
    if missing:
        raise UsageError(
            f"pass '{pass_class.name}' needs the option '{missing[0]}': write {pass_class.name}{{{missing[0]}=...}}."
        )
    return pass_class(**values)


def describe_options(pass_class: type[Pass]) -> list[tuple[str, str, str]]:
    """(name, type, default) of each option, as text, for help."""
    hints = get_type_hints(pass_class)
    rows: list[tuple[str, str, str]] = []
    for f in dataclasses.fields(pass_class):
        default = _default(f)
        shown = "required" if default is dataclasses.MISSING else print_value(default)
        rows.append((_dashed(f.name), _type_name(hints[f.name]), shown))
    return rows


def parse_value(kind: Any, text: str, what: str) -> Any:
    """``text`` as a value of type ``kind``: int, float, bool, str or one of them or None. Raises UsageError."""
    if get_origin(kind) in (Union, types.UnionType):
        if text == "none":
            return None
        kind = next(k for k in get_args(kind) if k is not types.NoneType)
    if kind is bool:
        if text in ("true", "false"):
            return text == "true"
        raise UsageError(f"{what} is 'true' or 'false', not '{text}'.")
    if kind is str:
        return json.loads(text) if text.startswith('"') else text
    if kind not in (int, float):
        raise UsageError(
            f"{what} has type {_type_name(kind)}, which has no text form: "
            "use int, float, bool, str or one of them | None."
        )
    try:
        return kind(text)
    except ValueError as error:
        raise UsageError(f"{what} is {'an integer' if kind is int else 'a number'}, not '{text}'.") from error


def print_value(value: Any) -> str:
    """The text that ``parse_value`` reads back."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) and value != "none" else json.dumps(value)
    return repr(value)


def _split_options(name: str, text: str) -> list[tuple[str, str]]:
    options: list[tuple[str, str]] = []
    position = 0
    while text[position:].strip():
        match = _OPTION.match(text, position)
        if match is None:
            raise UsageError(
                f"pass '{name}': cannot read the options at '{text[position:].strip()}'; "
                "write option=value, several separated by spaces, text with spaces in double quotes."
            )
        options.append((match[1], match[2]))
        position = match.end()
    return options


def _default(f: "dataclasses.Field[Any]") -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
