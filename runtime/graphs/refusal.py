"""Why a program cannot run as a CUDA graph, in words that name the node."""

import traceback
from collections.abc import Mapping
from pathlib import Path

from kimigraph.ir.errors import CompileError
from kimigraph.ir.manifest import Manifest

REMEDY = "Run it without cuda_graph (`kimigraph run` without --cuda-graph), or take the operation out of the model"
_SHOWN = 5


class GraphCaptureError(CompileError):
    """A program that cannot run as a CUDA graph; the message names the node."""


def program_name(manifest: Manifest) -> str:
    """What a message calls a program."""
    return " ".join(filter(None, (manifest.model, manifest.shape_key or manifest.phase))) or "the program"


def refuse_listed(manifest: Manifest) -> None:
    """GraphCaptureError where the manifest lists nodes that no graph can hold."""
    found: Mapping[str, str] = manifest.uncapturable
    if not found:
        return
    shown = "; ".join(f"{name} {reason}" for name, reason in list(found.items())[:_SHOWN])
    more = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
    raise GraphCaptureError(f"{program_name(manifest)} cannot run as a CUDA graph: node {shown}{more}. {REMEDY}")


def without_graph(error: GraphCaptureError) -> str:
    """What is told of a program that runs without a graph, as it may."""
    return f"{error}. Its steps run without a graph"


def refusal(manifest: Manifest, error: BaseException) -> GraphCaptureError:
    """The refusal after a capture that ``error`` ended: it names the statement of ``program.py`` that raised it."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return GraphCaptureError(
        f"{program_name(manifest)} cannot run as a CUDA graph: {statement(error)} could not be captured "
        f"({type(error).__name__}: {reason}). {REMEDY}"
    )


def statement(error: BaseException) -> str:
    """``node NAME (program.py, line N: TEXT)`` of the statement of a program that an exception went through.

    Without one, words for the program as a whole.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).name == "program.py" and frame.name == "step" and frame.lineno is not None:
            first, text = _first_line(Path(frame.filename), frame.lineno)
            name, equals, call = text.partition(" = ")
            node = name if equals and name.isidentifier() else text.partition("#")[2].partition(":")[0].strip()
            return f"node {node or '?'} (program.py, line {first}: {(call if equals else text).partition('  #')[0]})"
    return "a part of it"


def _first_line(path: Path, number: int) -> tuple[int, str]:
    """The number and text of the statement's first line: one that is wrapped is indented deeper from there on."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return number, ""
    first = number
    while first > 1 and lines[first - 1].rstrip().endswith(",") and not lines[first - 1].rstrip().endswith("("):
        first -= 1
    return first, lines[first - 1].strip()
