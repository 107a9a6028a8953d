"""Where in the model, and in the user's source, a node comes from."""

import os
import re
from typing import Any

import torch
from torch.fx import Node

_TORCH = os.path.dirname(torch.__file__) + os.sep


def module_path(node: Node) -> str:
    """Dotted path of the innermost module that the node was captured in, such as ``model.layers.3.self_attn``.

    Empty for the top module and for nodes without a recorded stack.
    """
    return _innermost(node)[0]


def module_class(node: Node) -> str:
    """Class name of the innermost module that the node was captured in; empty when unknown."""
    kind = _innermost(node)[1]
    return str(getattr(kind, "__name__", kind)).rpartition(".")[2]


def source_line(node: Node) -> str:
    """``file:line`` of the innermost frame of the node's recorded stack trace; empty when there is none.

    Frames inside torch are passed over while there are others: a linear layer is where the model calls it.
    """
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return ":".join((own or frames)[-1]) if frames else ""


def _innermost(node: Node) -> tuple[str, Any]:
    stack: dict[Any, Any] = node.meta.get("nn_module_stack") or {}
    for entry in reversed(list(stack.values())):
        path, kind = entry if isinstance(entry, tuple) else (entry, "")
        path = str(path).removeprefix("L['self']").removeprefix(".")
        if path:
            return path, kind
    return "", ""
