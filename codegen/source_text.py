"""Statements of ``program.py``: calls that can be wrapped, and the device that all of a program shares."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from kimigraph.ir.spelling import format_argument, format_call

LINE_LENGTH = 120
NameOf = Callable[[Node], str]


@dataclass(frozen=True)
class CallText:
    """A call in two parts, so that a long one can be wrapped between its arguments."""

    callee: str
    arguments: tuple[str, ...]

    def render(self, prefix: str, comment: str) -> list[str]:
        """Source lines of ``prefix + call``, with a trailing comment; prefix holds the indentation."""
        line = f"{prefix}{self.callee}({', '.join(self.arguments)})  # {comment}"
        if len(line) <= LINE_LENGTH or not self.arguments:
            return [line]
        indent = " " * (len(prefix) - len(prefix.lstrip()))
        rows = [f"{row}," for row in wrap(self.arguments, indent + "    ")]
        return [f"{prefix}{self.callee}(", *rows, f"{indent})  # {comment}"]


def operator_call(node: Node, name_of: NameOf) -> CallText | str:
    """The call of an operator outside ``kimigraph::``, or the expression of what is no call of torch.ops.

    CompileError names a node that has no spelling.
    """
    if not isinstance(node.target, OpOverload):
        return format_call(node, name_of)
    prefix = "" if node.target.namespace == "aten" else "torch.ops."
    return CallText(f"{prefix}{node.target}", call_arguments(node, name_of))


def call_arguments(node: Node, name_of: NameOf) -> tuple[str, ...]:
    """The arguments of a node as source, keywords last."""
    positional = (argument_text(value, name_of) for value in node.args)
    keywords = (f"{key}={argument_text(value, name_of)}" for key, value in node.kwargs.items())
    return (*positional, *keywords)


def argument_text(value: Any, name_of: NameOf) -> str:
    """One argument as source. Every device is spelled ``DEVICE``: a program runs on one device, that of its target."""
    return "DEVICE" if isinstance(value, torch.device) else format_argument(value, name_of)


def one_line(text: str) -> str:
    """A name from outside (a module's, a tensor's, a model's) as a comment or a docstring may hold it."""
    return " ".join(text.split()).replace("\\", "/").replace('"""', "'''")


def wrap(items: Sequence[str], prefix: str) -> list[str]:
    """``prefix + a, b, c`` as one line, or several with the same prefix where one would be too long."""
    lines: list[str] = []
    current = ""
    for item in items:
        longer = f"{current}, {item}" if current else prefix + item
        if current and len(longer) >= LINE_LENGTH:
            lines.append(current)
            longer = prefix + item
        current = longer
    return [*lines, current] if current else lines
