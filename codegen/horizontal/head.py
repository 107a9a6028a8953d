"""What a kernel file of a horizontal region begins with, and functions of templates that it takes over."""

import ast
from collections.abc import Collection
from pathlib import Path

_TEMPLATES = Path(__file__).parent.parent / "templates"

HEAD = """
import os
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
OPTIONS: dict[str, Any] = {options}
"""


def template_functions(wanted: Collection[str]) -> list[str]:
    """The text of functions that kernels of few rows are made of, and of their rounding, as the templates have it."""
    found: list[str] = []
    for name in ("rounding", "product_rows"):
        source = (_TEMPLATES / f"{name}.py").read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name in wanted:
                found.append("\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno]))
    return found
