"""The host half of a kernel file: its ``launch`` and what that calls, without the functions that Triton compiles.

An artifact with cubins carries it as ``kernels/<name>_launch.py``; ``support/cubins.py`` gives it the kernels and the
few names of Triton that host code may use.
"""

import ast
from collections.abc import Iterator

from kimigraph.codegen.support.cubins import STAND_INS
from kimigraph.ir.errors import CompileError

_PACKAGES = ("triton",)


def host_half(name: str, text: str) -> str:
    """The text of ``kernels/<name>_launch.py``. CompileError where host code uses of Triton what is not there.

    ``text`` is the kernel file's: its ``@triton.jit`` functions become cubins, its imports of Triton go.
    """
    tree, lines = ast.parse(text), text.splitlines()
    compiled = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and _is_compiled(node)]
    foreign = {alias for node in tree.body for alias in _foreign_names(node)}
    kept = [node for node in tree.body if not _is_dropped(node, foreign)]
    used = {inner.id for node in kept for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    for node in kept:
        _check_uses(name, node, foreign)
    parts = ["\n".join(_source(node, lines) for node in kept if isinstance(node, ast.Import | ast.ImportFrom))]
    parts += ["INTERPRET = False", "\n".join(f'{kernel} = cubin("{kernel}")' for kernel in compiled if kernel in used)]
    others = [node for node in kept if not isinstance(node, ast.Import | ast.ImportFrom)]
    plain = "\n".join(_source(node, lines) for node in others if not isinstance(node, ast.FunctionDef))
    functions = [_source(node, lines) for node in others if isinstance(node, ast.FunctionDef)]
    head = "\n".join(part for part in [*parts, plain] if part)
    return "\n\n\n".join([_docstring(name) + "\n\n" + head, *functions]) + "\n"


def _docstring(name: str) -> str:
    return (
        f'"""The host half of {name}.py: what allocates and launches, without Triton.\n\n'
        "support/cubins.py runs this file; cubin() is there, and what stands in for names of Triton.\n"
        '"""'
    )


def _source(node: ast.stmt, lines: list[str]) -> str:
    first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", ()))])
    return "\n".join(lines[first - 1 : node.end_lineno])


def _is_compiled(node: ast.FunctionDef) -> bool:
    """Whether a decorator such as ``@triton.jit`` hands the function to Triton."""
    return any(name.id in ("triton", "gluon") for item in node.decorator_list for name in _names(item))


def _is_dropped(node: ast.stmt, foreign: set[str]) -> bool:
    """Whether a statement of the kernel file has no place on the host."""
    if isinstance(node, ast.FunctionDef):
        return _is_compiled(node)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return bool(_foreign_names(node))
    if isinstance(node, ast.Expr):  # docstrings
        return True
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    return value is not None and any(name.id in foreign for name in _names(value))


def _foreign_names(node: ast.stmt) -> set[str]:
    """The names that an import of Triton binds."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _PACKAGES:
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Import):
        names = [alias for alias in node.names if alias.name.partition(".")[0] in _PACKAGES]
        return {alias.asname or alias.name.partition(".")[0] for alias in names}
    return set()


def _check_uses(name: str, node: ast.stmt, foreign: set[str]) -> None:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in foreign and inner.id not in STAND_INS:
            raise _unknown(name, inner.id, inner.lineno)
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id in foreign:
            if not hasattr(STAND_INS.get(inner.value.id), inner.attr):
                raise _unknown(name, f"{inner.value.id}.{inner.attr}", inner.lineno)


def _unknown(name: str, used: str, line: int) -> CompileError:
    return CompileError(
        f"kernels/{name}.py, line {line}: launch() uses {used}, which programs with cubins do not have: do without it "
        "in the template, or add it to STAND_INS in codegen/support/cubins.py"
    )


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))
