"""House rules that no linter knows: sizes of files, ways of loading that run code, exemptions from strict types.

Prints what breaks a rule as ``file:line: message`` and exits with 1 when there is any. Prints the files that are exempt
from strict types, with their reasons, in any case.
"""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 500
FOLDERS = ("kimigraph", "passes", "codegen", "runtime", "scripts", "tests", "examples", "bench")
TYPED = ("kimigraph/", "passes/", "codegen/", "runtime/", "scripts/")
BASIC_ALLOWED = (
    "kimigraph/adapters/",
    "kimigraph/bench/peers/",
    "codegen/templates/",
    "kimigraph/ir/reference/",
    "kimigraph/ir/operators/",
)
"""Folders whose files may open with the line ``# pyright: basic`` and, in the next one, a comment that says why."""

BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "diskcache"}
BANNED_COMMENTS = ("# type: ignore", "# noqa", "# pyright: ignore")


def check_file(path: str, text: str) -> Iterator[tuple[int, str]]:
    """(line, message) of each rule that the Python file ``path`` breaks."""
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield MAX_LINES + 1, f"{len(lines)} lines; split the file (the limit is {MAX_LINES})"
    for number, line in enumerate(lines, 1):
        for comment in BANNED_COMMENTS:
            if line.rstrip().startswith(comment) or f"  {comment}" in line:
                yield number, f"'{comment}' hides a fault; mend it, or relax the rule for all in pyproject.toml"
        if line.startswith("# pyright:") and path.startswith(TYPED) and exemption(path, text) is None:
            where = ", ".join(BASIC_ALLOWED)
            yield number, f"'# pyright: basic' belongs in line 1 of a file in {where}, with the reason below"
    yield from _unsafe_loading(ast.parse(text, path))


def exemption(path: str, text: str) -> str | None:
    """The reason that exempts a file from strict types, or None.

    The file opens with ``# pyright: basic`` (and rules that kernel text cannot keep), the reason stands below.
    """
    first, *rest = text.splitlines()[:4] or [""]
    if not re.fullmatch(r"# pyright: basic(, report\w+=false)*", first.rstrip()) or not path.startswith(BASIC_ALLOWED):
        return None
    reason = next((line for line in rest if not line.startswith("# pyright: ")), "")
    return reason.lstrip("# ").removeprefix("Reason: ") or None if reason.startswith("#") else None


def _unsafe_loading(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")) if not _weights_only(node):
                yield node.lineno, "torch.load without weights_only=True runs code from the file"
                continue
            case _:
                continue
        for module in modules:
            if module.partition(".")[0] in BANNED_MODULES:
                yield node.lineno, f"{module} runs code from the data that it loads; use JSON or safetensors"


def _weights_only(call: ast.Call) -> bool:
    values = [keyword.value for keyword in call.keywords if keyword.arg == "weights_only"]
    return bool(values) and isinstance(values[0], ast.Constant) and values[0].value is True


def python_files(root: Path) -> list[str]:
    """The Python files of the checkout by path relative to ``root``; links are not followed, so each is there once."""
    found: list[str] = []
    for name in FOLDERS:
        for folder, _, files in os.walk(root / name, followlinks=False):
            found += [(Path(folder) / file).relative_to(root).as_posix() for file in files if file.endswith(".py")]
    return sorted(found)


def main() -> int:
    """Check the checkout that this script lies in; the exit status."""
    root = Path(__file__).resolve().parent.parent
    faults: list[str] = []
    basic: list[str] = []
    for path in python_files(root):
        text = (root / path).read_text(encoding="utf-8")
        faults += [f"{path}:{line}: {message}" for line, message in check_file(path, text)]
        reason = exemption(path, text)
        if reason:
            basic.append(f"  {path}: {reason}")
    print("Exempt from strict types:", *(basic or ["  none"]), sep="\n")
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
