"""A program as a picture of boxes and arrows, at three distances: the model, its layers, its kernels."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph, Node

from kimigraph.ir.errors import UsageError
from kimigraph.ir.fake import describe
from kimigraph.ir.launches import launches_of
from kimigraph.ir.operators import operator_of
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path

Zoom = Literal["model", "layer", "kernel"]
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)(?:\.|$)")
_STATE = re.compile(r"(?:cache|state)\.(\d+)\.")


@dataclass(frozen=True)
class Box:
    """One box: ``kind`` is input, state, output, operator (semantic), region, call or group. ``frame`` names the frame
    around it; empty for none."""

    name: str
    lines: tuple[str, ...]
    kind: str
    frame: str = ""


@dataclass(frozen=True)
class Arrow:
    """An arrow between two boxes, by their names. One that is ``far`` passes over a layer, as a residual does."""

    source: str
    target: str
    label: str = ""
    far: bool = False


@dataclass(frozen=True)
class Picture:
    """Boxes, and arrows between them."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]


def draw(
    program: CapturedProgram, zoom: Zoom, layer: int | None = None, costs: Mapping[str, float] | None = None
) -> Picture:
    """The picture of a program.

    ``model``: a box for each layer and what stands beside the layers. ``layer``: in each, a box for each module, with
    what it launches. ``kernel``: a box for each launch, with its result and, from ``costs`` in seconds, its estimate.
    ``layer`` keeps that layer alone, and the inputs that it takes. Raises UsageError for a layer that is not there.
    """
    places = Places(program)
    if layer is not None and layer not in places.layers:
        known = ", ".join(map(str, sorted(places.layers))) or "none"
        raise UsageError(f"--layer {layer}: the program has layers {known}")
    title = f"{program.info.get('source', 'program')} {program.info.get('shape_key', '')}".strip()
    keys = {node: _key(node, places, zoom) for node in program.graph_module.graph.nodes}
    shown = _shown(program.graph_module.graph, keys, places, layer)
    boxes = _boxes(shown, keys, places, zoom, costs or {})
    return Picture(f"{title}, by {zoom}", boxes, _arrows(program.graph_module.graph, keys, boxes))


class Places:
    """Where each node of a program belongs: its layer and its module. What has no record is with the one before."""

    def __init__(self, program: CapturedProgram) -> None:
        self.sources = {spec.name: spec for spec in program.inputs}
        self.paths: dict[Node, str] = {}
        calls = [node for node in program.graph_module.graph.nodes if node.op not in ("placeholder", "output")]
        said = {node: module_path(node) for node in calls}
        around = {path[: found.start()] for path in said.values() if (found := _LAYER.search(path))} | {""}
        last = ""
        for node in calls:
            last = self.paths[node] = said[node] if said[node] not in around else last
        self.layers = {layer for path in self.paths.values() if (layer := layer_of(path)) is not None}

    def frame(self, node: Node) -> str:
        """The layer of a node, such as ``layer 3``; else the first names of its module."""
        path = self.paths.get(node, "")
        layer = layer_of(path)
        return f"layer {layer}" if layer is not None else path.rpartition(".")[2] or "model"

    def module(self, node: Node) -> str:
        """The module of a node within its layer."""
        path = self.paths.get(node, "")
        found = _LAYER.search(path)
        return path[found.end() :].partition(".")[0] or "layer" if found else path.rpartition(".")[2] or "model"

    def state_layer(self, node: Node) -> int | None:
        """The layer of a cache or state; None for other inputs."""
        found = _STATE.match(self.sources[node.name].source)
        return int(found[1]) if found else None


def layer_of(path: str) -> int | None:
    """The number of the layer that a module's path lies in."""
    found = _LAYER.search(path)
    return int(found[1]) if found else None


def _key(node: Node, places: Places, zoom: Zoom) -> str:
    """The name of the box that stands for a node; empty for weights and, by kernel, for what launches nothing."""
    if node.op == "output":
        return "output"
    if node.op == "placeholder":
        spec = places.sources[node.name]
        if spec.bound:
            return ""
        layer = places.state_layer(node)
        return f"states of layer {layer}" if zoom == "model" and layer is not None else spec.source
    if zoom == "kernel":
        return node.name if launches_of(node) else ""
    frame = places.frame(node)
    return frame if zoom == "model" else f"{frame}: {places.module(node)}"


def _shown(graph: Graph, keys: Mapping[Node, str], places: Places, layer: int | None) -> list[Node]:
    """The nodes with a box; of one layer, also what stands beside it without being of another."""
    nodes = [node for node in graph.nodes if keys[node]]
    if layer is None:
        return nodes
    wanted = f"layer {layer}"
    inside = {node for node in nodes if places.paths.get(node) is not None and places.frame(node) == wanted}
    return [node for node in nodes if node in inside or (node.op == "placeholder" and _given_to(node, inside))]


def _given_to(node: Node, inside: Iterable[Node]) -> bool:
    members, pending, seen = set(inside), list(node.users), set[Node]()
    while pending:
        user = pending.pop()
        if user in members:
            return True
        if user not in seen and not launches_of(user):
            seen.add(user)
            pending.extend(user.users)
    return False


def _boxes(
    shown: Iterable[Node], keys: Mapping[Node, str], places: Places, zoom: Zoom, costs: Mapping[str, float]
) -> tuple[Box, ...]:
    grouped: dict[str, list[Node]] = {}
    for node in shown:
        grouped.setdefault(keys[node], []).append(node)
    made: list[Box] = []
    for name, nodes in grouped.items():
        first = nodes[0]
        if first.op in ("placeholder", "output"):
            state = first.op == "placeholder" and places.sources[first.name].kind == "cache"
            kind = "state" if state else "input" if first.op == "placeholder" else "output"
            shapes = [describe(first.meta.get("val"))] if len(nodes) == 1 and first.op == "placeholder" else []
            lines = [name, *(shapes or ([f"{len(nodes)} tensors"] if len(nodes) > 1 else []))]
            made.append(Box(name, tuple(lines), kind))
        elif zoom == "kernel":
            made.append(_kernel_box(first, places, costs))
        elif launched := [node for node in nodes if launches_of(node)]:
            title, frame = (name, "") if zoom == "model" else (name.partition(": ")[2], places.frame(first))
            frame = "" if title == frame else frame
            launched.sort(key=lambda node: operator_of(node) is None)
            counts = Counter(_operator_name(node) for node in launched)
            lines = [f"{count} x {kind}" if count > 1 else kind for kind, count in counts.items()]
            made.append(Box(name, (title, *lines[:8], *(("...",) if len(lines) > 8 else ())), "group", frame))
    return tuple(made)


def _kernel_box(node: Node, places: Places, costs: Mapping[str, float]) -> Box:
    kind = "operator" if operator_of(node) is not None else "region" if node.op == "call_module" else "call"
    lines = [node.name, _operator_name(node), describe(node.meta.get("val"))]
    if node.name in costs:
        lines.append(f"{costs[node.name] * 1e6:.2f} us")
    return Box(node.name, tuple(dict.fromkeys(lines)), kind, places.frame(node))


def _operator_name(node: Node) -> str:
    operator = operator_of(node)
    if operator is not None:
        return operator.name
    if node.op == "call_module":
        return str(node.meta.get("region", "region"))
    return str(node.target).removeprefix("aten.").removesuffix(".default")


def _arrows(graph: Graph, keys: Mapping[Node, str], boxes: Sequence[Box]) -> tuple[Arrow, ...]:
    """From box to box, looking through what has none; several tensors between two boxes are one arrow."""
    order = _order(boxes)
    known = {box.name for box in boxes}
    origins: dict[Node, frozenset[str]] = {}
    found: dict[tuple[str, str], set[Node]] = {}
    for node in graph.nodes:
        given = frozenset[str]().union(*(origins[source] for source in node.all_input_nodes))
        key = keys[node]
        if key not in known:
            origins[node] = given
            continue
        for source in node.all_input_nodes:
            for origin in origins[source] - {key}:
                found.setdefault((origin, key), set()).add(source)
        origins[node] = frozenset((key,))
    return tuple(
        Arrow(
            a, b, f"{len(nodes)} tensors" if len(nodes) > 1 else "", order.get(b, 0) - order.get(a, order.get(b, 0)) > 1
        )
        for (a, b), nodes in found.items()
    )


def _order(boxes: Sequence[Box]) -> dict[str, int]:
    """The place of each box's layer among the layers; inputs and outputs have none."""
    inside = [box for box in boxes if box.kind not in ("input", "state", "output")]
    places = {frame: place for place, frame in enumerate(dict.fromkeys(box.frame or box.name for box in inside))}
    return {box.name: places[box.frame or box.name] for box in inside}
