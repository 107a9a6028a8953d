"""Nodes of the domain ``kimigraph``: calls of semantic operators, states updated in place again."""

from typing import Any

import torch

from kimigraph.capture.onnx.builder import ATEN, Value
from kimigraph.capture.onnx.call import Call
from kimigraph.capture.onnx.numbers import shortest
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.operators.registry import Operator


def operator_named(name: str, parameters: tuple[str, ...]) -> Operator | None:
    """The operator that a function such as ``LightningIndexer_2`` with these inputs is; None for another function."""
    base = name.rstrip("0123456789").removesuffix("_") if name[-1:].isdigit() and "_" in name else name
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in base).removeprefix("_")
    operator = OPERATORS.get(snake)
    if operator is None:
        return None
    known = {argument.name for argument in operator.overload._schema.arguments}
    return operator if all(_argument(parameter, known) is not None for parameter in parameters) else None


def _argument(parameter: str, known: set[str]) -> tuple[str, int | None] | None:
    """The argument that an input of the function is, and its place where the argument is a list."""
    if parameter in known:
        return parameter, None
    name, _, place = parameter.rpartition("_")
    return (name, int(place)) if name in known and place.isdigit() else None


def call_operator(c: Call, operator: Operator, parameters: tuple[str, ...]) -> tuple[Value, ...]:
    """Call the operator; results, then the new value of each argument that it writes.

    A written state is written itself where nobody reads its old value afterwards, else a copy of it.
    """
    schema = operator.overload._schema
    known = {argument.name for argument in schema.arguments}
    given: dict[str, Any] = {name: _plain(schema, name, value) for name, value in c.attributes.items() if name in known}
    writes = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    written: dict[str, Value] = {}
    for place, parameter in enumerate(parameters):
        found, value = _argument(parameter, known), c.optional(place)
        assert found is not None
        if value is None:
            continue
        name, number = found
        if name in writes:
            value = written[name] = value if c.may_write(place) else c.build.call(ATEN.clone.default, value)
        if number is None:
            given[name] = value
        else:
            given.setdefault(name, []).append(value)
    for argument in schema.arguments:
        optional = "Optional" in str(argument.type) or str(argument.type).endswith("?")
        if argument.name not in given and not argument.has_default_value() and optional:
            given[argument.name] = None
    result = c.build.call(operator.overload, **given)
    results = result if isinstance(result, tuple) else (result,)
    order = [a.name for a in schema.arguments if a.name in written]
    return (*results, *(written[name] for name in order))


def _plain(schema: Any, name: str, value: Any) -> Any:
    """An attribute as the schema has it: ONNX has no booleans, and floats in fp32."""
    kind = next(str(argument.type) for argument in schema.arguments if argument.name == name)
    if "bool" in kind and isinstance(value, int):
        return bool(value)
    if isinstance(value, float):
        return shortest(value)
    if "Tensor" not in kind and isinstance(value, torch.Tensor):
        return value.tolist()
    return value
