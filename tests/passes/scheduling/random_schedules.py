"""Random programs with views, writes in place and several results, and what orders and uses their nodes: worked out
here from how the programs were built, with nothing of the compiler."""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec

ATEN = torch.ops.aten
SIZE, NBYTES, INPUTS = 4, 16, 3
KINDS = ("add", "add", "add", "view", "add_", "sort", "random")
Value = tuple[Node, str]
Steps = list[tuple[str, int, int]]
steps_of = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 400), st.integers(0, 400)), min_size=3, max_size=30
)


@dataclass
class Built:
    """A program and its facts. ``reads`` and ``writes`` name the storages of each node that starts work, ``makes`` the
    new ones of them; ``effects`` are the nodes that draw random numbers, in order."""

    program: Any = None
    work: list[Node] = field(default_factory=lambda: [])
    reads: dict[Node, set[str]] = field(default_factory=lambda: {})
    writes: dict[Node, set[str]] = field(default_factory=lambda: {})
    makes: dict[Node, set[str]] = field(default_factory=lambda: {})
    named: dict[str, list[Node]] = field(default_factory=lambda: {})
    effects: list[Node] = field(default_factory=lambda: [])
    returned: set[str] = field(default_factory=lambda: set())

    @property
    def graph(self) -> Graph:
        return self.program.graph_module.graph

    def node(self, name: str) -> Node:
        return next(node for node in self.graph.nodes if node.name == name)

    def needed(self) -> set[tuple[Node, Node]]:
        """All pairs of work that must keep their order: one writes what the other touches, or both have effects."""
        pairs: set[tuple[Node, Node]] = set()
        for number, second in enumerate(self.work):
            for first in self.work[:number]:
                touched = self.reads[second] | self.writes[second]
                clash = self.writes[first] & touched or self.writes[second] & (self.reads[first] | self.writes[first])
                if clash or (first in self.effects and second in self.effects):
                    pairs.add((first, second))
        return pairs


def build(steps: Steps, outputs: int = 2, window: int = 400) -> Built:
    """The program that does ``steps`` on earlier values, by number, and returns its last values.

    ``window``: operands are among as many latest values.
    """
    graph = Graph()
    with FakeTensorMode():
        value = torch.empty(SIZE)
    values: list[Value] = []
    for number in range(INPUTS):
        node = graph.placeholder(f"x{number}")
        node.meta["val"] = value
        values.append((node, node.name))
    built = Built()
    for kind, left, right in steps:
        recent = values[-window:]
        _step(graph, built, values, value, kind, recent[left % len(recent)], recent[right % len(recent)])
    results = values[-outputs:]
    built.returned = {storage for _, storage in results}
    graph.output(tuple(node for node, _ in results))
    written = {storage for storages in built.writes.values() for storage in storages}
    inputs = tuple(
        InputSpec(f"x{number}", "input", f"x{number}", (SIZE,), (1,), "float32", mutated=f"x{number}" in written)
        for number in range(INPUTS)
    )
    specs = tuple(OutputSpec(f"out_{number}", f"[{number}]") for number in range(outputs))
    built.program = CapturedProgram(GraphModule(torch.nn.Module(), graph), inputs, specs)
    return built


def _step(graph: Graph, built: Built, values: list[Value], value: Any, kind: str, first: Value, second: Value) -> None:
    (a, a_storage), (b, b_storage) = first, second
    if kind == "view":
        node = graph.create_node("call_function", ATEN.view.default, (a, [SIZE]), name="view")
        node.meta["val"] = value
        values.append((node, a_storage))
        return
    if kind == "sort":
        node = graph.create_node("call_function", ATEN.sort.default, (a,), name="sort")
        node.meta["val"] = (value, value)
        storages = [f"{node.name}[0]", f"{node.name}[1]"]
        items = [graph.call_function(operator.getitem, (node, index)) for index in range(2)]
        for item, storage in zip(items, storages, strict=True):
            item.meta["val"] = value
            built.named[storage] = [item]
            values.append((item, storage))
        _record(built, node, {a_storage}, set(storages), set(storages))
        return
    if kind == "add_":
        node = graph.create_node("call_function", ATEN.add_.Tensor, (a, b), name="add_")
        _record(built, node, {a_storage, b_storage}, {a_storage}, set())
        values.append((node, a_storage))
    else:
        target: Any = ATEN.rand_like.default if kind == "random" else ATEN.add.Tensor
        node = graph.create_node("call_function", target, (a,) if kind == "random" else (a, b), name=kind)
        _record(built, node, {a_storage} if kind == "random" else {a_storage, b_storage}, {node.name}, {node.name})
        built.named[node.name] = [node]
        built.effects += [node] if kind == "random" else []
        values.append((node, node.name))
    node.meta["val"] = value


def _record(built: Built, node: Node, reads: set[str], writes: set[str], makes: set[str]) -> None:
    built.work.append(node)
    built.reads[node], built.writes[node], built.makes[node] = reads, writes, makes


def reached(built: Built) -> dict[Node, set[Node]]:
    """Brute force: for each node of work what is done before it begins, by walking all edges of streams and waits.

    The graph's own order is the order of issue. Edges are followed until nothing is new.
    """
    work = [node for node in built.graph.nodes if node in built.reads]
    names = {node.name: node for node in work}
    edges: dict[Node, set[Node]] = {}
    for number, node in enumerate(work):
        before = [other for other in work[:number] if _stream(other) == _stream(node)]
        edges[node] = set(before[-1:]) | {names[name] for name in node.meta.get("waits", ())}
    return {node: _closure(edges, edges[node]) for node in work}


def joined(built: Built) -> bool:
    """Brute force: whether all work is done when the caller's stream goes on behind the program."""
    before = reached(built)
    work = [node for node in built.graph.nodes if node in built.reads]
    output = next(iter(reversed(built.graph.nodes)))
    last = [node for node in work if not _stream(node)][-1:]
    last += [node for node in work if node.name in output.meta.get("waits", ())]
    done = set(last)
    for node in last:
        done |= before[node]
    return done == set(work)


def _stream(node: Node) -> int:
    return node.meta.get("stream", 0)


def _closure(edges: dict[Node, set[Node]], start: set[Node]) -> set[Node]:
    found, open_nodes = set(start), list(start)
    while open_nodes:
        for node in edges[open_nodes.pop()] - found:
            found.add(node)
            open_nodes.append(node)
    return found


def is_safe(built: Built, plan: dict[str, tuple[int, int]] | None = None) -> bool:
    """Brute force: whether every needed order holds, everything is joined, and no byte is taken while it is in use."""
    before = reached(built)
    if any(first not in before[second] for first, second in built.needed()) or not joined(built):
        return False
    makers = {storage: node for node, storages in built.makes.items() for storage in storages}
    for one in plan or {}:
        for other in plan or {}:
            if one < other and _overlap(plan[one], plan[other]):
                if not (_ended(built, before, one, makers[other]) or _ended(built, before, other, makers[one])):
                    return False
    return True


def _ended(built: Built, before: dict[Node, set[Node]], storage: str, maker: Node) -> bool:
    users = [node for node in built.work if storage in built.reads[node] | built.writes[node]]
    return storage not in built.returned and all(user in before[maker] for user in users)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < sum(other) and other[0] < sum(one)


def set_plan(built: Built, plan: dict[str, tuple[int, int]]) -> None:
    """Give the nodes that stand for each storage its place."""
    for storage, place in plan.items():
        for node in built.named[storage]:
            node.meta["buffer"] = place
