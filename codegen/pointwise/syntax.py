"""Small pieces of Python syntax trees, and statements as lines of source."""

import ast
from collections.abc import Sequence

LINE_LENGTH = 120
_OPERATORS: dict[str, type[ast.operator]] = {
    "+": ast.Add,
    "-": ast.Sub,
    "*": ast.Mult,
    "/": ast.Div,
    "//": ast.FloorDiv,
    "%": ast.Mod,
    "&": ast.BitAnd,
    "|": ast.BitOr,
    "^": ast.BitXor,
}
_COMPARISONS: dict[str, type[ast.cmpop]] = {
    "lt": ast.Lt,
    "le": ast.LtE,
    "gt": ast.Gt,
    "ge": ast.GtE,
    "eq": ast.Eq,
    "ne": ast.NotEq,
}


def name(text: str) -> ast.expr:
    """A variable, or a dotted name."""
    first, *rest = text.split(".")
    tree: ast.expr = ast.Name(first, ast.Load())
    for part in rest:
        tree = ast.Attribute(tree, part, ast.Load())
    return tree


def number(value: float | int | bool) -> ast.expr:
    """A literal; what is no finite number is spelled ``float("inf")``."""
    if isinstance(value, float) and value - value != 0:
        return call("float", ast.Constant(str(value)))
    if not isinstance(value, bool) and (value < 0 or str(value).startswith("-")):
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    return ast.Constant(value)


def call(function: str | ast.expr, *arguments: ast.expr, **keywords: ast.expr) -> ast.expr:
    """A call; ``function`` may be a dotted name."""
    target = name(function) if isinstance(function, str) else function
    return ast.Call(target, list(arguments), [ast.keyword(key, value) for key, value in keywords.items()])


def method(value: ast.expr, attribute: str, *arguments: ast.expr) -> ast.expr:
    """``value.attribute(arguments)``."""
    return call(ast.Attribute(value, attribute, ast.Load()), *arguments)


def binary(left: ast.expr, operator: str, right: ast.expr) -> ast.expr:
    """``left operator right``."""
    return ast.BinOp(left, _OPERATORS[operator](), right)


def compare(left: ast.expr, operator: str, right: ast.expr) -> ast.expr:
    """A comparison, ``operator`` as ATen names it (lt, le, ...)."""
    return ast.Compare(left, [_COMPARISONS[operator]()], [right])


def joined(operator: str, parts: Sequence[ast.expr]) -> ast.expr | None:
    """``a operator b operator ...``; None for no parts."""
    tree: ast.expr | None = None
    for part in parts:
        tree = part if tree is None else binary(tree, operator, part)
    return tree


def assignment(target: str, value: ast.expr) -> ast.stmt:
    """``target = value``."""
    return ast.Assign([ast.Name(target, ast.Store())], value, lineno=0)


def lines(statement: ast.stmt | ast.expr, indent: str) -> list[str]:
    """A statement as source, wrapped between the arguments of its call where it is too long."""
    tree = statement if isinstance(statement, ast.stmt) else ast.Expr(statement)
    text = indent + ast.unparse(tree)
    value = getattr(tree, "value", None)
    if len(text) <= LINE_LENGTH or value is None:
        return [text]
    head = indent + ast.unparse(tree).removesuffix(ast.unparse(value))
    if isinstance(value, ast.Call) and (value.args or value.keywords):
        arguments = [ast.unparse(item) for item in (*value.args, *value.keywords)]
        return [f"{head}{ast.unparse(value.func)}(", *(f"{indent}    {item}," for item in arguments), f"{indent})"]
    if isinstance(value, ast.BinOp):
        operator = ast.unparse(value).removeprefix(ast.unparse(value.left)).split()[0]
        left, right = ast.unparse(value.left), ast.unparse(value.right)
        return [f"{head}(", f"{indent}    {left}", f"{indent}    {operator} {right}", f"{indent})"]
    return [text]
