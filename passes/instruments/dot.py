"""The graph as a picture, in the text format of Graphviz."""

import torch
from torch.fx import Graph, Node

from kimigraph.ir.fake import describe

_COLOURS = {"placeholder": "#dbe9f6", "output": "#dbe9f6", "kimigraph": "#fde0c5", "call_module": "#e2f0d9"}


def graph_to_dot(graph: Graph) -> str:
    """A ``digraph``: one box per node with operator and shape, semantic operators and regions coloured."""
    lines = ["digraph program {", '  node [shape=box, style="filled,rounded", fillcolor=white, fontname=Helvetica];']
    for node in graph.nodes:
        label = "\\n".join(
            _escape(part) for part in (node.name, _operator(node), describe(node.meta.get("val"))) if part
        )
        lines.append(f'  "{_escape(node.name)}" [label="{label}", fillcolor="{_colour(node)}"];')
        lines.extend(f'  "{_escape(source.name)}" -> "{_escape(node.name)}";' for source in node.all_input_nodes)
    return "\n".join([*lines, "}", ""])


def _operator(node: Node) -> str:
    if node.op in ("placeholder", "output"):
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.name()
    return getattr(node.target, "__name__", str(node.target))


def _colour(node: Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "kimigraph":
        return _COLOURS["kimigraph"]
    return _COLOURS.get(node.op, "white")


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
