"""Values and indices as expressions of a kernel."""

import ast
from collections.abc import Callable

import torch

from kimigraph.codegen.pointwise.syntax import binary, call, compare, joined, method, name, number
from kimigraph.ir.pointwise import Index, Value
from kimigraph.ir.pointwise.index import Fetched, Quotient, Remainder, Variable, Within
from kimigraph.ir.pointwise.values import NARROW, Condition

OperandOf = Callable[[Value], ast.expr]
TYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.bool: "int1",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "quotient": "//", "rest": "%"}
"""``//`` and ``%`` are C's: they round to 0."""
_CALLS = {
    **{op: f"tl.{op}" for op in ("exp", "exp2", "log", "log2", "rsqrt", "sin", "cos", "erf", "floor", "ceil", "abs")},
    "sqrt": "tl.sqrt_rn",
    "div": "tl.div_rn",
    "ratio": "quotient",
    "where": "tl.where",
    "tanh": "hyperbolic_tangent",
    "log1p": "log_one_plus",
}
HELPERS = {"tanh": "hyperbolic_tangent", "log1p": "log_one_plus", "ratio": "quotient"}
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def triton_type(dtype: torch.dtype) -> ast.expr:
    """``tl.float32`` and so on."""
    return name(f"tl.{TYPES[dtype]}")


def index_expression(index: Index, operand: OperandOf) -> ast.expr:
    """An index as integer arithmetic."""
    tree: ast.expr | None = None
    for atom, factor in index.terms:
        part = _atom(atom, operand)
        scaled = part if abs(factor) == 1 else binary(number(abs(factor)), "*", part)
        if tree is None:
            tree = scaled if factor > 0 else ast.UnaryOp(ast.USub(), scaled)
        else:
            tree = binary(tree, "+" if factor > 0 else "-", scaled)
    if tree is None:
        return number(index.constant)
    if index.constant:
        tree = binary(tree, "+" if index.constant > 0 else "-", number(abs(index.constant)))
    return tree


def _atom(atom: Variable | Quotient | Remainder | Fetched | Within, operand: OperandOf) -> ast.expr:
    if isinstance(atom, Variable):
        return name(atom.name)
    if isinstance(atom, Fetched):
        return operand(atom.value)
    assert not isinstance(atom, Within)
    return binary(index_expression(atom.of, operand), "//" if isinstance(atom, Quotient) else "%", number(atom.by))


def condition(conditions: tuple[Condition, ...], operand: OperandOf) -> ast.expr | None:
    """All conditions as one truth value."""
    parts: list[ast.expr] = []
    for index, low, high in conditions:
        tree = index_expression(index, operand)
        if index.least < low or any(isinstance(atom, Fetched) for atom in index.atoms()):
            parts.append(compare(tree, "ge", number(low)))
        if index.most >= high:
            parts.append(compare(tree, "lt", number(high)))
    return joined("&", parts)


def expression(value: Value, operand: OperandOf) -> ast.expr:
    """What computes a value from others; loads and reductions are the body's."""
    args = [operand(argument) for argument in value.args]
    if value.op == "constant":
        held = value.detail[1]
        return number(int(held) if value.dtype is torch.bool else held)
    if value.op == "index":
        tree = index_expression(value.detail, operand)
        return tree if value.dtype is torch.int32 else method(tree, "to", triton_type(value.dtype))
    if value.op == "convert":
        return _converted(value, args[0])
    if value.op == "where":
        return _chosen(value, args)
    if value.op in COMPARISONS:
        return compare(args[0], value.op, args[1])
    if value.op in _INFIX:
        return binary(args[0], _INFIX[value.op], args[1])
    if value.op in ("neg", "not"):
        return ast.UnaryOp(ast.USub() if value.op == "neg" else ast.Invert(), args[0])
    if value.op in ("tanh", "ratio"):
        args.append(name("INTERPRET"))
    return call(_CALLS[value.op], *args)


def _converted(value: Value, given: ast.expr) -> ast.expr:
    source, target = value.args[0].dtype, value.detail
    if target is torch.bool:
        return compare(given, "ne", number(0))
    if target not in NARROW:
        return method(given, "to", triton_type(target))
    if not source.is_floating_point:
        given = method(given, "to", triton_type(torch.float32))
    if target is torch.bfloat16:
        return call("round_to_bf16", given, name("INTERPRET"))
    return method(method(given, "to", triton_type(torch.float16)), "to", triton_type(torch.float32))


def _chosen(value: Value, args: list[ast.expr]) -> ast.expr:
    tree = call("tl.where", *args)
    if value.dtype is torch.bool:
        return compare(tree, "ne", number(0))
    constants = all(argument.op == "constant" for argument in value.args[1:])
    if constants and not value.dtype.is_floating_point and value.dtype is not torch.int32:
        return method(tree, "to", triton_type(value.dtype))
    return tree
