"""Work on weights alone moves from the step to the time when the program is bound."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.row_products import is_cast_alone

_CAT = torch.ops.aten.cat.default
_ROTATED = OPERATORS["hadamard_rows"].overload
_PACKED = OPERATORS["mxfp4_quantize"].overload


@dataclass(frozen=True)
class PreparedProgram:
    """A program that takes prepared weights as inputs, and how they come from the model's.

    ``steps`` maps the source name of a prepared weight to its steps (``kimigraph.ir.preparation``); ``sources`` are the
    weights that these read and the program itself no longer takes.
    """

    program: CapturedProgram
    steps: dict[str, list[dict[str, Any]]]
    sources: tuple[InputSpec, ...]


def prepared(program: CapturedProgram) -> PreparedProgram:
    """Take what passes marked as prepared (``meta["prepared"]``) out of the step; ``program`` itself stays as it is.

    That is, concatenations, casts, rotations and MXFP4 of weights that no step updates. Weights that something else
    reads too stay inputs.
    """
    copy = program.copy()
    graph = copy.graph_module.graph
    specs = {spec.name: spec for spec in copy.inputs}
    steps: dict[str, list[dict[str, Any]]] = {}
    made: list[InputSpec] = []
    ready: dict[str, Node] = {}
    for node in list(graph.nodes):
        parts = prepared_from(node, specs) if node.meta.get("prepared") else []
        if not parts:
            continue
        names = [specs[part.name].source for part in parts]
        source, step = _step(node, names)
        if steps.get(source, [step]) != [step]:
            source = f"{source} along {step['dim']}"  # the same weights below one another and side by side
        if source in steps:
            node.replace_all_uses_with(ready[source], propagate_meta=False)
            graph.erase_node(node)
            continue
        value = node.meta["val"]
        dtype = str(value.dtype).removeprefix("torch.")
        steps[source] = [step]
        made.append(InputSpec(node.name, "weight", source, tuple(value.shape), value.stride(), dtype))
        ready[source] = _become_input(node, parts[0])
    if not made:
        return PreparedProgram(program, {}, ())
    read = {name for [step] in steps.values() for name in step["of"]}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    gone = [node for node in placeholders if not node.users and node.name in specs and specs[node.name].source in read]
    for node in gone:
        graph.erase_node(node)
    known = specs | {spec.name: spec for spec in made}
    inputs = tuple(known[node.name] for node in graph.nodes if node.op == "placeholder")
    tensors = {name: tensor for name, tensor in copy.tensors.items() if name not in {node.name for node in gone}}
    graph.lint()
    copy.graph_module.recompile()
    return PreparedProgram(
        replace(copy, inputs=inputs, tensors=tensors), steps, tuple(specs[node.name] for node in gone)
    )


def prepared_from(node: Node, specs: dict[str, InputSpec]) -> list[Node]:
    """The weights that the node concatenates, casts, rotates or packs, when that is all and no step updates them."""
    alone = node.target in (_ROTATED, _PACKED) or is_cast_alone(node)
    given: Any = node.args[0] if node.target is _CAT else node.args[:1] if alone else []
    found = [specs.get(part.name) if isinstance(part, Node) and part.op == "placeholder" else None for part in given]
    own = all(spec is not None and spec.kind == "weight" and not spec.mutated for spec in found)
    return list(given) if own else []


def _step(node: Node, names: list[str]) -> tuple[str, dict[str, Any]]:
    """The name of what the node makes of the weights ``names``, and the step that makes it."""
    if node.target is _CAT:
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        return joined(names), {"op": "cat", "dim": dim, "of": names}
    if node.target is _ROTATED:
        width = node.kwargs["width"]
        return f"{names[0]} rotated by {width}", {"op": "hadamard", "width": width, "of": names}
    if node.target is _PACKED:
        return f"{names[0]} as mxfp4", {"op": "mxfp4", "of": names}
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    return f"{names[0]} as {dtype}", {"op": "cast", "dtype": dtype, "of": names}


def joined(names: list[str]) -> str:
    """One name for several: ``layers.0.q_proj+k_proj.weight``, what they begin and end with said once."""
    parts = [name.split(".") for name in names]
    least = min(len(part) for part in parts) - 1
    head = _shared([part[:least] for part in parts])
    tail = _shared([part[head:][: head - len(part) : -1] for part in parts])
    middle = "+".join(".".join(part[head : len(part) - tail]) for part in parts)
    return ".".join([*parts[0][:head], middle, *parts[0][len(parts[0]) - tail :]])


def _shared(lists: list[list[str]]) -> int:
    """How many items all lists begin with."""
    return next((n for n, items in enumerate(zip(*lists, strict=False)) if len(set(items)) > 1), min(map(len, lists)))


def _become_input(node: Node, before: Node) -> Node:
    """Put an input in the node's place, under its name."""
    graph = node.graph
    with graph.inserting_before(before):
        placeholder = graph.placeholder(f"{node.name}_prepared")
    placeholder.meta = {"val": node.meta["val"]}
    node.replace_all_uses_with(placeholder, propagate_meta=False)
    name = node.name
    graph.erase_node(node)
    placeholder.name = placeholder.target = name
    return placeholder
