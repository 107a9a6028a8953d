"""What went wrong in a capture, in the user's terms."""

import re
import traceback
from pathlib import Path
from types import TracebackType

import torch

from kimigraph.ir.errors import CaptureError

_DATA_DEPENDENT = (
    "data-dependent",
    "datadependent",
    "guard on data",
    "_local_scalar_dense",
    "is_nonzero",
    "boolean value of tensor",
    "dynamic control flow",
    "data dependent",
)


def describe_failure(name: str, error: BaseException) -> CaptureError:
    """The error to raise when exporting ``name`` failed with ``error``: cause, the user's file and line, remedy."""
    place = user_line(error.__traceback__)
    where = f" at {place}" if place else ""
    text = " ".join(str(error).split())
    low = f"{type(error).__name__} {text}".lower()
    if any(mark in low for mark in _DATA_DEPENDENT):
        return CaptureError(
            f"{name} cannot be captured: the code{where} decides by the value of a tensor, and a graph holds one path. "
            "Write the choice with torch.where, take the value as a Python argument, or move it out of the model"
        )
    if (constant := re.search(r"Constant (\S+) is mutated", text)) is not None:
        return hidden_state(name, [constant.group(1)])
    return CaptureError(f"{name} cannot be captured: {type(error).__name__}{where}: {_shorten(text)}")


def hidden_state(name: str, tensors: list[str]) -> CaptureError:
    """The error for tensors that a model changes although nothing tells a graph about them."""
    return CaptureError(
        f"{name} changes {', '.join(tensors[:3])} in place, which is neither an argument nor a registered buffer, so "
        "the change would be missing from the graph: pass the tensor as an argument of forward, or use register_buffer"
    )


def user_line(trace: TracebackType | None) -> str:
    """``file:line`` of the innermost frame outside of torch and of this package's capture, or an empty string."""
    skipped = (
        str(Path(torch.__file__).parent),
        str(Path(__file__).parent),
        str(Path(__file__).parent.parent / "adapters"),
    )
    for frame in reversed(traceback.extract_tb(trace)):
        path = frame.filename
        if (
            not path.startswith(skipped)
            and not path.startswith("<")
            and "/lib/python" not in path.replace("site-packages", "")
        ):
            return f"{path}:{frame.lineno}"
    for frame in reversed(traceback.extract_tb(trace)):
        if not frame.filename.startswith(skipped) and not frame.filename.startswith("<"):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _shorten(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
