"""Where two forms of a program part ways: nodes of one name compute one value, so the first that does not tells."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Interpreter, Node

from kimigraph.ir.accuracy import TOLERANCE_FP32, tensor_error
from kimigraph.ir.data_sets import DataSet, make_data
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.purity import mutated_arguments, storage_root

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Parting:
    """``node`` is the first node whose value differs (of the program after); ``suspects`` the changed nodes above it.

    All are names; ``suspects`` that exist no more after the pass are named too.
    """

    node: str
    suspects: tuple[str, ...]


def part_ways(
    before: CapturedProgram, after: CapturedProgram, data: DataSet, tolerance: float = TOLERANCE_FP32
) -> Parting | None:
    """Run both on one data set and find the first node that differs; None when all nodes of equal names agree.

    An input that is updated differently stands for the nodes that write it.
    """
    want, got = node_values(before, data), node_values(after, data)
    old = {node.name: node for node in before.graph_module.graph.nodes}
    new = {node.name: node for node in after.graph_module.graph.nodes}
    for name, node in new.items():
        if name in want and name in got and tensor_error(got[name], want[name])[1] > tolerance:
            return Parting(name, _suspects(node, old, new))
    for spec in before.inputs:
        writers = [n.name for n in (*old.values(), *new.values()) if _writes(n, spec.name)]
        if spec.mutated and tensor_error(got[f"{spec.name} after"], want[f"{spec.name} after"])[1] > tolerance:
            return Parting(spec.name, tuple(dict.fromkeys(writers)))
    return None


def node_values(program: CapturedProgram, data: DataSet) -> Values:
    """The value of every tensor node in the first step, as it was when computed; updated inputs as ``<name> after``."""
    constants = {s.source: program.tensors[s.name] for s in program.inputs if s.kind == "constant"}
    tensors = make_data(data, program.inputs, constants)
    recorder = _Recorder(program)
    with torch.no_grad():
        recorder.run(*tensors)
    after = {f"{s.name} after": t for s, t in zip(program.inputs, tensors, strict=True) if s.mutated}
    return {**recorder.values, **after}


class _Recorder(Interpreter):
    def __init__(self, program: CapturedProgram) -> None:
        super().__init__(program.graph_module)
        self.values: Values = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and n.op != "placeholder":
            self.values[n.name] = result.clone()
        return result


def _writes(node: Node, placeholder: str) -> bool:
    return any(storage_root(found).name == placeholder for found in mutated_arguments(node))


def _suspects(node: Node, old: dict[str, Node], new: dict[str, Node]) -> tuple[str, ...]:
    """The node and, upwards from it, what the pass made or changed; then what it took away there."""
    found = [node.name]
    for name in found:
        arguments = new[name].all_input_nodes if name in new else []
        found += [a.name for a in arguments if _changed(a, old) and a.name not in found]
    gone = [a.name for name in found if name in old for a in old[name].all_input_nodes if a.name not in new]
    return tuple(dict.fromkeys((*found, *gone)))


def changed_nodes(before: CapturedProgram, after: CapturedProgram) -> tuple[str, ...]:
    """The names of nodes that one program has and the other has not, or has with another operator or arguments."""
    old = {node.name: node for node in before.graph_module.graph.nodes}
    new = {node.name: node for node in after.graph_module.graph.nodes}
    gone = [name for name in old if name not in new]
    return (*gone, *(name for name, node in new.items() if node.op != "output" and _changed(node, old)))


def _changed(node: Node, old: dict[str, Node]) -> bool:
    if node.op == "placeholder":
        return False
    other = old.get(node.name)
    return other is None or (node.target, _texts(node)) != (other.target, _texts(other))


def _texts(node: Node) -> tuple[str, str]:
    return repr(node.args), repr(node.kwargs)
