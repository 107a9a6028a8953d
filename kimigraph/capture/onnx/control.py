"""Branches and loops of ONNX: the branch that is known, the turns that are counted.

A program is for fixed shapes and has no control flow: loops are unrolled where the number of their turns is known, and
a branch that the run alone decides is both branches and a choice between their results.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from kimigraph.adapters.onnx_file import FileGraph, FileNode
from kimigraph.capture.onnx.builder import ATEN, Value
from kimigraph.capture.onnx.call import Call, scalar

MOST_UNROLLED = 2**15
"""Nodes that the loops and branches of a file may become."""

RunGraph = Callable[[FileGraph, Sequence[Value]], tuple[Value, ...]]
"""Translates a graph for these inputs, and gives its results."""


def _graph(c: Call, name: str) -> FileGraph:
    graph = c.attribute(name)
    if not isinstance(graph, FileGraph):
        raise c.refused(f"has no graph '{name}'")
    return graph


def _if(c: Call, run: RunGraph) -> tuple[Value, ...]:
    condition = c.operand(0)
    branches = _graph(c, "then_branch"), _graph(c, "else_branch")
    if condition.form.numel() != 1:
        raise c.refused(f"decides by a tensor of shape {list(condition.shape)}: one truth is taken")
    decided = scalar(condition)
    if decided is not None:
        return run(branches[0] if decided else branches[1], ())
    first = len(c.build.graph.nodes)
    then, otherwise = (run(branch, ()) for branch in branches)
    _require_choice(c, then, otherwise)
    for node in list(c.build.graph.nodes)[first:]:
        if _may_fail(node):
            raise c.refused(
                f"is decided in the run, and '{node.meta.get('stack_trace', '').rpartition(' in ')[2]}' in a branch of "
                "it picks by values of the run, which may lie outside where the other branch is meant. Where an input "
                "decides, give it: --set 'value NAME=1'"
            )
    truth = c.build.call(ATEN.reshape.default, condition, [])
    return tuple(c.build.call(ATEN.where.self, truth, a, b) for a, b in zip(then, otherwise, strict=True))


def _require_choice(c: Call, then: Sequence[Value], otherwise: Sequence[Value]) -> None:
    """Both results of a branch must be of one shape and type, for one of them is chosen."""
    for name, a, b in zip(c.node.outputs, then, otherwise, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise c.refused(
                f"is decided in the run, and its result '{name}' is {list(a.shape)} {a.dtype} or {list(b.shape)} "
                f"{b.dtype}: a program has one shape. Where an input decides, give it: --set 'value NAME=1'"
            )


_PICKING = ("index", "gather", "embedding", "index_select", "index_put", "index_copy", "scatter", "scatter_add")


def _may_fail(node: Node) -> bool:
    """Whether a node picks places by values, or is an operator of ours, which may do so."""
    target: Any = node.target
    name = str(getattr(target, "_schema", None) and target._schema.name)
    return name.startswith("kimigraph::") or name.removeprefix("aten::") in _PICKING


def _loop(c: Call, run: RunGraph) -> tuple[Value, ...]:
    body, carried = _graph(c, "body"), [c.operand(place) for place in range(2, len(c.operands))]
    turns, goes_on = c.optional(0), c.optional(1)
    most = None if turns is None else scalar(turns)
    if turns is not None and most is None:
        raise c.refused("turns as often as values of the run say: a program turns a known number of times")
    going = goes_on if goes_on is not None else c.build.constant(True)
    rows: list[tuple[Value, ...]] = []
    while most is None or len(rows) < most:
        if scalar(going) is None:
            raise c.refused("goes on as long as values of the run say: a program turns a known number of times")
        if not scalar(going):
            break
        _require_small(c, body, most or len(rows) + 1)
        turn = c.build.constant(len(rows), torch.int64)
        results = run(body, (turn, going, *carried))
        going, carried = results[0], list(results[1 : 1 + len(carried)])
        rows.append(results[1 + len(carried) :])
    return (*carried, *_stacked(c, rows, len(c.node.outputs) - len(carried), lambda _: (0, False)))


def _scan(c: Call, run: RunGraph) -> tuple[Value, ...]:
    body, count = _graph(c, "body"), int(c.attribute("num_scan_inputs", 0))
    values = [c.operand(place) for place in range(len(c.operands))]
    if not 0 < count <= len(values):
        raise c.refused(f"says that it has {count} scan inputs, of {len(values)} in all")
    carried, scanned = values[:-count], values[-count:]
    axes = [c.checked_axis(a, v.rank) for a, v in zip(_flags(c, "scan_input_axes", count), scanned, strict=True)]
    back = _flags(c, "scan_input_directions", count)
    sizes = {value.shape[axis] for value, axis in zip(scanned, axes, strict=True)}
    if len(sizes) != 1:
        raise c.refused(f"scans axes of different sizes, {sorted(map(str, sizes))}")
    turns = int(sizes.pop())
    _require_small(c, body, turns)
    rows: list[tuple[Value, ...]] = []
    for turn in range(turns):
        places = [turns - 1 - turn if backwards else turn for backwards in back]
        slices = [
            c.build.call(ATEN.select.int, value, axis, place)
            for value, axis, place in zip(scanned, axes, places, strict=True)
        ]
        results = run(body, (*carried, *slices))
        carried = list(results[: len(carried)])
        rows.append(results[len(carried) :])
    outputs = len(body.outputs) - len(carried)
    out_axes, out_back = _flags(c, "scan_output_axes", outputs), _flags(c, "scan_output_directions", outputs)
    return (*carried, *_stacked(c, rows, outputs, lambda place: (out_axes[place], bool(out_back[place]))))


def _flags(c: Call, name: str, count: int) -> list[int]:
    values = [int(value) for value in c.attribute(name, [0] * count)]
    if len(values) != count:
        raise c.refused(f"has {len(values)} of {name} for {count} tensors")
    return values


def _stacked(
    c: Call, rows: Sequence[tuple[Value, ...]], count: int, form: Callable[[int], tuple[int, bool]]
) -> list[Value]:
    """What the turns left, each output along a new axis; ``form``: that axis, and whether the last turn is first."""
    if count and not rows:
        raise c.refused("turns not once, so that the shape of what its turns leave is not known")
    results: list[Value] = []
    for place in range(count):
        axis, backwards = form(place)
        parts = [row[place] for row in (reversed(rows) if backwards else rows)]
        results.append(c.build.call(ATEN.stack.default, parts, c.checked_axis(axis, parts[0].rank + 1)))
    return results


def _require_small(c: Call, body: FileGraph, turns: int) -> None:
    size = _nodes_in(body) * turns
    if size > MOST_UNROLLED:
        raise c.refused(
            f"turns {turns} times over {_nodes_in(body)} nodes; programs have no loops, and at most {MOST_UNROLLED} "
            "nodes are unrolled. Export it for fewer tokens"
        )


def _nodes_in(graph: FileGraph) -> int:
    def within(node: FileNode) -> int:
        return 1 + sum(_nodes_in(inner) for inner in node.graphs.values())

    return sum(map(within, graph.nodes))


CONTROL: dict[str, Callable[[Call, RunGraph], Any]] = {"If": _if, "Loop": _loop, "Scan": _scan}
"""Translations by the operator's name in the standard domain."""
