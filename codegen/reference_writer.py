"""``kernels/reference.py`` of a ``cpu:reference`` artifact: the references that the program uses, as written."""

import ast
from collections.abc import Iterable
from importlib import util
from pathlib import Path

from kimigraph.ir.errors import CompileError

_PACKAGE = "kimigraph.ir.reference"


def reference_text(operators: Iterable[str]) -> str:
    """The references of ``operators`` in one module: imports first and once, then each file's definitions.

    A file comes behind those that it takes names from, which its definitions may need when they are made.
    """
    imports: dict[str, None] = {}
    bodies: list[str] = []
    owners: dict[str, str] = {}
    for op in _with_shared(sorted(set(operators)), []):
        source = _source(op)
        kept: list[str] = []
        for statement in ast.parse(source).body:
            if _shared_file(statement) is not None:
                continue
            if isinstance(statement, ast.Import | ast.ImportFrom):
                imports[ast.unparse(statement)] = None
            elif not _is_docstring(statement):
                _claim(owners, statement, op)
                kept.append(_segment(source, statement))
        bodies.append(f"# {op}\n" + "\n\n\n".join(kept))
    header = '"""Eager fp32 references of the operators that program.py calls."""'
    return "\n\n\n".join(["\n\n".join([header, "\n".join(sorted(imports))]), *bodies]) + "\n"


def _with_shared(files: Iterable[str], found: list[str]) -> list[str]:
    """``found`` and the files that are not among them, each behind the files that it takes names from."""
    for file in files:
        if file not in found:
            shared = [name for item in ast.parse(_source(file)).body if (name := _shared_file(item)) is not None]
            _with_shared(shared, found)
            found.append(file)
    return found


def _source(op: str) -> str:
    specification = util.find_spec(f"{_PACKAGE}.{op}")
    if specification is None or specification.origin is None:
        raise CompileError(f"{op} has no reference, so no cpu:reference program can call it: give it {_PACKAGE}.{op}")
    return Path(specification.origin).read_text(encoding="utf-8")


def _shared_file(statement: ast.stmt) -> str | None:
    """The other reference file that an import takes names from, if it is one: its text comes along."""
    if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(f"{_PACKAGE}."):
        return str(statement.module).removeprefix(f"{_PACKAGE}.")
    return None


def _segment(source: str, statement: ast.stmt) -> str:
    """The statement's own text, decorators included."""
    first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))])
    return "\n".join(source.splitlines()[first - 1 : statement.end_lineno])


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _claim(owners: dict[str, str], statement: ast.stmt, op: str) -> None:
    """One name, one definition: two files that define it would overwrite each other in silence."""
    names = [getattr(statement, "name", "")]
    if isinstance(statement, ast.Assign):
        names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
    for name in names:
        if owners.setdefault(name, op) != op:
            raise CompileError(f"the references of {owners[name]} and {op} both define {name}: rename one of the two")
