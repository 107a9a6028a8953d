"""Random numbers have no place in a captured step: a graph that draws them cannot be checked or reordered."""

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from kimigraph.ir.errors import CaptureError
from kimigraph.ir.provenance import module_path, source_line


def check_deterministic(graph: Graph, name: str) -> None:
    """CaptureError when a node of ``graph`` draws random numbers; attention and dropout at rate 0 draw none."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload) and _draws(node):
            raise CaptureError(
                f"{name} draws random numbers: {node.target} in {module_path(node) or 'forward'}, {source_line(node)}. "
                "Call model.eval() to switch dropout off, or pass the random tensor as an argument"
            )


def _draws(node: Node) -> bool:
    target = node.target
    assert isinstance(target, OpOverload)
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments: dict[str, Any] = dict(
        zip((argument.name for argument in target._schema.arguments), node.args, strict=False)
    ) | dict(node.kwargs)
    if "dropout" in target._schema.name:
        return bool(arguments.get("train", True)) and arguments.get("p", 0.5) != 0
    if "attention" in target._schema.name:
        return arguments.get("dropout_p", 0.0) != 0
    return True
