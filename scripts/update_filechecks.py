"""Write the CHECK lines of the tests in ``tests/filecheck`` anew, out of what the passes do now.

``python scripts/update_filechecks.py [FILE]...`` writes, all files when none is named; look at the difference before
you commit it. With ``--check`` nothing is written, and the exit status is 1 when a file is out of date.

Each file is a printed program with a first line ``# RUN: python -m kimigraph.tools.opt %s OPTIONS | filecheck ...``.
The CHECK lines stand at its end: the functions of the program after the passes line by line, then remarks.
"""

import argparse
import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

from kimigraph.tools.opt import main as opt

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "filecheck"
_RUN = re.compile(r"# RUN: python -m kimigraph\.tools\.opt (.+) \| filecheck (.+)")


def test_files() -> list[Path]:
    """The printed programs, one folder a pass."""
    return sorted(FOLDER.glob("*/*.py"))


def run_line(path: Path) -> tuple[list[str], list[str]]:
    """The arguments of ``kimigraph.tools.opt`` and those of ``filecheck`` in a file's first line."""
    match = _RUN.fullmatch(path.read_text(encoding="utf-8").partition("\n")[0])
    if match is None:
        raise SystemExit(f"{path}: the first line must be '# RUN: python -m kimigraph.tools.opt %s ... | filecheck %s'")
    first, second = (
        [str(path) if word == "%s" else word for word in shlex.split(part)] for part in (match[1], match[2])
    )
    return first, second


def command(path: Path) -> str:
    """The RUN line as a command to paste at the root of the checkout."""
    name = path.relative_to(ROOT).as_posix()
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# RUN: ").replace("%s", name)


def output(path: Path) -> str:
    """What the first command of the RUN line prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        opt(run_line(path)[0])
    return printed.getvalue()


def with_checks(text: str, printed: str) -> str:
    """The file ``text`` up to its first CHECK line, with CHECK lines for the output ``printed``."""
    program, _, remarks = printed.partition('\n\n\nif __name__ == "__main__":\n')
    functions = program[program.index("\n@torch.no_grad()\n") :].replace("@torch.no_grad()\n", "")
    body = [line for line in functions.splitlines() if line.strip()]
    told = [line for line in remarks.splitlines() if line.startswith("# ")]
    lines = [f"# CHECK-LABEL: {_escaped(body[0])}", *(f"# CHECK-NEXT: {_escaped(line)}" for line in body[1:])]
    lines += [f"# CHECK: {_escaped(line)}" for line in told]
    return text.partition("\n# CHECK")[0].rstrip("\n") + "\n\n" + "\n".join(lines) + "\n"


def _escaped(line: str) -> str:
    """A line of output as a pattern that matches it alone; two brackets or braces in a row would be read as more."""
    return re.sub(r"\[\[+|\{\{+", lambda found: "{{" + re.sub(r"(.)", r"\\\1", found[0]) + "}}", line)


def main() -> int:
    """Bring the files up to date; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = 0
    for path in options.files or test_files():
        old = path.read_text(encoding="utf-8")
        new = with_checks(old, output(path.resolve()))
        if new == old:
            continue
        stale += 1
        print(f"{path}: {'out of date' if options.check else 'written'}")
        if not options.check:
            path.write_text(new, encoding="utf-8")
    return int(options.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
