"""How a command fails: one paragraph on stderr and an exit code, never a traceback from five layers down."""

import functools
import os
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

import typer

from kimigraph.ir import env
from kimigraph.ir.errors import KimigraphError

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPTED = 130
EXTRAS = {"transformers": "hf", "onnx": "onnx", "onnxruntime": "onnx"}
PACKAGE = Path(__file__).parent.parent


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorate a command: what it raises becomes a message on stderr and an exit code."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = command(*args, **kwargs)
            if env.started_ranks():
                _leave_ranks()
            return result
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            _leave_closed_pipe()
        except KimigraphError as error:
            if env.show_tracebacks():
                traceback.print_exc()
            fail(f"error: {error}", error.exit_code)
        except Exception as error:
            if env.show_tracebacks():
                traceback.print_exc()
            fail(f"error: {_describe(error)}", 1)

    return wrapped


def _leave_ranks() -> None:
    """End groups over Gloo, whose threads abort a process that ends before them. Those of NCCL go with the process:
    CUDA graphs may still hold their communicators. A rank that failed does not wait for its groups."""
    if "kimigraph.ir.ranks" in sys.modules:
        from kimigraph.ir import ranks

        ranks.leave("gloo")


def fail(message: str, code: int) -> NoReturn:
    """Print ``message`` as one paragraph on stderr and exit with ``code``. A rank leaves it for its agent, too."""
    ranks = env.started_ranks()
    if env.rank_error_file() is not None:
        from kimigraph.runtime.parallel.launch import record_failure

        record_failure(message.removeprefix("error: "))
    typer.echo((f"rank {ranks[0]}: " if ranks else "") + " ".join(message.split()), err=True)
    raise typer.Exit(code)


def _describe(error: Exception) -> str:
    """An error that no one foresaw: what it is and where it arose."""
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("kimigraph"):
        package = error.name.partition(".")[0]
        extra = f"[{EXTRAS[package]}]" if package in EXTRAS else ""
        return f"this needs the package {package}, which is not installed: pip install 'kimigraph{extra}'"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)] or frames
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno} in {ours[-1].name}"
    text = textwrap.shorten(str(error), 400, placeholder=" ...")
    return (
        f"{type(error).__name__} at {place}: {text}. kimigraph did not foresee this: please report it, with the output "
        "of the same command under KIMIGRAPH_TRACEBACK=1."
    )


def _leave_closed_pipe() -> NoReturn:
    """The reader of stdout has gone (``kimigraph ... | head``): stop quietly, and keep Python from flushing into it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(1)
