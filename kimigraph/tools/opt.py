"""``python -m kimigraph.tools.opt FILE --passes TEXT``: run passes on a printed program and print what they make of it.

FILE is a dump of ``--dump-passes``, or anything in that form. It is run to get at its tables, so it has to be trusted
as much as any other script. The tests in ``tests/filecheck`` call this, and so can a person with a question to a pass.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from runpy import run_path

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import KimigraphError, UsageError
from kimigraph.ir.printer import print_program
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.reader import read_program
from kimigraph.ir.remarks import Remark
from kimigraph.passes import PassContext, Pipeline, run_pipeline

_PARTS = ("step", "INPUTS", "OUTPUTS", "CONSTANTS")


def read_script(path: Path) -> CapturedProgram:
    """The program of a dump. UsageError when the file is none; CompileError for a line that no dump has."""
    if not path.is_file():
        raise UsageError(f"{path} is no file; name a dump, such as DIR/000-capture.py of --dump-passes DIR.")
    found = run_path(str(path))
    missing = [name for name in _PARTS if name not in found]
    if missing:
        raise UsageError(f"{path} is no dump of a program: it has no {', '.join(missing)}.")
    return read_program(*(found[name] for name in _PARTS))


def optimize_script(path: Path, passes: str, remarks: bool = False) -> str:
    """The program in ``path`` after the pipeline ``passes``, printed; with ``remarks``, these follow as comments."""
    program, config = read_script(path), CompileConfig(passes=passes)
    records = run_pipeline(program, Pipeline.parse(passes), PassContext(config))
    text = print_program(program, title=f"{path.stem} after {passes or 'no pass'}")
    told = [remark for record in records for remark in record.result.remarks] if remarks else []
    return text + "".join(f"{_comment(remark)}\n" for remark in told)


def _comment(remark: Remark) -> str:
    return f"# {remark.kind} {remark.pass_name} at {remark.node or 'no node'}: {remark.message}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and print the program. Exits with 1 when a pass fails and with 2 on wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m kimigraph.tools.opt", description="run passes on a printed program"
    )
    parser.add_argument("file", type=Path, help="a dump")
    parser.add_argument("--passes", default="", help="pipeline, such as 'canonicalize,raise-kda' (default: no pass)")
    parser.add_argument("--remarks", action="store_true", help="print the passes' remarks after the program")
    options = parser.parse_args(arguments)
    try:
        text = optimize_script(options.file, options.passes, options.remarks)
    except KimigraphError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    print(text, end="")


if __name__ == "__main__":
    main()
