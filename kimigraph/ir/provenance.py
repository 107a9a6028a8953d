"""Where in the model, and in the user's source, a node comes from."""

import re
from typing import Any

from torch.fx import Node


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
    """``file:line`` of the innermost frame of the node's recorded stack trace; empty when there is none."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return ":".join(frames[-1]) if frames else ""


def _innermost(node: Node) -> tuple[str, Any]:
    stack: dict[Any, Any] = node.meta.get("nn_module_stack") or {}
    for entry in reversed(list(stack.values())):
        path, kind = entry if isinstance(entry, tuple) else (entry, "")
        path = str(path).removeprefix("L['self']").removeprefix(".")
        if path:
            return path, kind
    return "", ""
