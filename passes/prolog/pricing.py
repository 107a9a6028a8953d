"""What a prolog costs merged, split and as it stands: the passes that follow are tried on a copy of it alone."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.dependences import work_dependences
from kimigraph.ir.fake import infer
from kimigraph.ir.operators import operator_of
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.purity import dead_code, is_pure, region_module
from kimigraph.passes.algebra.nodes import packet
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.fingerprint import Fingerprint, graph_fingerprint
from kimigraph.passes.gate import RewriteGate
from kimigraph.passes.prolog.branches import Prolog
from kimigraph.passes.scheduling.branches import best_placement, costs_of, on_one_stream

BEYOND = "beyond"
"""Key of the mark at what takes a prolog's results: it is there for the passes to see, and costs nothing."""

_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm"))


@dataclass(frozen=True)
class Price:
    """Seconds of one form of a prolog on one stream and on several, and its kernels."""

    serial: float
    seconds: float
    kernels: int

    @property
    def hidden(self) -> float:
        """What several streams save, waits between them included."""
        return self.serial - self.seconds


@dataclass(frozen=True)
class Prices:
    """A prolog as it stands, as three branches, and merged."""

    apart: Price
    split: Price
    merged: Price

    @property
    def gain(self) -> float:
        """Seconds that branches are faster than merged kernels."""
        return self.merged.seconds - self.split.seconds

    def describe(self, streams: int, device: str) -> str:
        """All three, and where the difference comes from."""
        fewer, lanes = self.apart.kernels - self.merged.kernels, "one stream" if streams == 1 else f"{streams} streams"
        return (
            f"{self.apart.serial * 1e6:.2f} us one kernel after another ({self.apart.kernels} kernels), "
            f"{self.split.seconds * 1e6:.2f} us as three branches on {lanes} ({self.split.kernels} kernels), "
            f"{self.merged.seconds * 1e6:.2f} us merged ({self.merged.kernels} kernels) on {device}: branches hide "
            f"{max(self.split.hidden, 0.0) * 1e6:.2f} us of launches, events paid; merging has {fewer} kernels fewer, "
            f"which saves {(self.apart.serial - self.merged.serial) * 1e6:.2f} us"
        )


@dataclass(frozen=True)
class Pricing:
    """Prices the prologs of one program; equal ones, such as those of equal layers, once.

    ``passes`` follow on the prolog, ``merging`` among them merge: they are what ``apart`` goes without.
    """

    program: CapturedProgram
    context: PassContext
    passes: Sequence[Pass]
    merging: frozenset[str]
    streams: int
    known: dict[Fingerprint, Prices]

    def prices(self, prolog: Prolog, branches: Mapping[str, Sequence[Node]]) -> Prices:
        """The three forms of a prolog. Refused where no copy of it alone can be made."""
        whole = isolated(self.program, prolog)
        key = _form(whole)
        if key not in self.known:
            unmerged = [item for item in self.passes if item.name not in self.merging]
            self.known[key] = Prices(
                self._price(isolated(self.program, prolog), unmerged),
                self._price(isolated(self.program, prolog, branches), self.passes),
                self._price(whole, self.passes),
            )
        return self.known[key]

    def _price(self, program: CapturedProgram, passes: Sequence[Pass]) -> Price:
        context = replace(self.context, gate=RewriteGate())
        for item in passes:
            item.apply(program, context)
        found = work_dependences(program.graph_module.graph)
        nodes = [node for node in found if not _is_beyond(node)]
        costs = costs_of(nodes, context.device)
        serial = on_one_stream(nodes, costs)
        several = best_placement(nodes, found, costs, self.streams).seconds if self.streams > 1 else serial
        return Price(serial, min(serial, several), len(nodes))


def isolated(
    program: CapturedProgram, prolog: Prolog, branches: Mapping[str, Sequence[Node]] | None = None
) -> CapturedProgram:
    """A program of the prolog alone, with what takes its results; ``branches`` are marked at their nodes.

    What comes from before it is an input, what is made of weights alone is made again. Raises Refused where a value
    from outside is no tensor.
    """
    specs = {spec.name: spec for spec in program.inputs}
    inside = set(prolog.nodes)
    consumers = {prolog.indexer, *_consumers(inside)}
    home = {node: name for name, nodes in (branches or {}).items() for node in nodes}
    members = _with_weight_nodes({*inside, *consumers}, specs)
    graph, values = Graph(), dict[Node, Node]()
    inputs: list[InputSpec] = []
    for node in sorted({argument for member in members for argument in member.all_input_nodes} - set(members)):
        values[node] = graph.placeholder(node.name)
        values[node].meta = {"val": node.meta["val"]}
        inputs.append(specs.get(node.name) or _input(node))
    for node in members:
        values[node] = graph.node_copy(node, lambda argument: values[argument])
        values[node].meta = dict(node.meta)
        if node in consumers:
            values[node].meta[BEYOND] = True
        if node in home:
            values[node].meta["branch"] = f"{home[node]} of {prolog.indexer.name}"
    results = _results(graph, [values[node] for node in members if node in consumers or _leaves(node, members)])
    graph.output(tuple(results))
    outputs = tuple(OutputSpec(node.name, node.name) for node in results)
    module = GraphModule(torch.nn.Module(), graph)
    return CapturedProgram(module, tuple(inputs), outputs, info=dict(program.info))


def _form(program: CapturedProgram) -> Fingerprint:
    """What the program is, whatever its inputs are called: equal layers have equal prologs."""
    inputs = ((spec.kind, spec.shape, spec.stride, spec.dtype, spec.mutated) for spec in program.inputs)
    return (*inputs, *(item for item in graph_fingerprint(program.graph_module) if item[0] != "placeholder"))


def _consumers(inside: set[Node]) -> list[Node]:
    """Operators and products outside that take a result, through views: whether it can be a part of something else
    depends on them."""
    found: list[Node] = []
    for node in inside:
        for user in node.users:
            if user not in inside and (operator_of(user) is not None or packet(user) in _PRODUCTS):
                found.append(user)
    return found


def _with_weight_nodes(members: set[Node], specs: Mapping[str, InputSpec]) -> list[Node]:
    """The members, and the nodes that they need which are made of weights alone, in graph order."""
    bound = {name for name, spec in specs.items() if spec.bound}
    known: dict[Node, bool] = {}

    def of_weights(node: Node) -> bool:
        if node not in known:
            own = node.op == "placeholder" and node.name in bound
            made = node.op == "call_function" and is_pure(node) and bool(node.all_input_nodes)
            known[node] = own or (made and all(map(of_weights, node.all_input_nodes)))
        return known[node]

    found, pending = set(members), list(members)
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in found and node.op != "placeholder" and of_weights(node):
                found.add(node)
                pending.append(node)
    return sorted(found)


def _input(node: Node) -> InputSpec:
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Refused(f"the prolog takes {node.name} from outside, which is no tensor", node, 1)
    return InputSpec(node.name, "input", node.name, tuple(value.shape), value.stride(), str(value.dtype)[6:])


def _leaves(node: Node, members: Sequence[Node]) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(user not in members for user in node.users)


def _results(graph: Graph, nodes: Sequence[Node]) -> list[Node]:
    """The tensors that the copy returns: of several results the first."""
    found: list[Node] = []
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, tuple | list):
            node = graph.call_function(operator.getitem, (node, 0))
            infer(node)
        if isinstance(node.meta.get("val"), torch.Tensor):
            found.append(node)
    return found


def _is_beyond(node: Node) -> bool:
    child = region_module(node) if node.op == "call_module" else None
    inner = [node] if child is None else child.graph.nodes
    return any(item.meta.get(BEYOND) for item in inner)


def cut(program: CapturedProgram) -> CapturedProgram:
    """An ``isolated`` program without what stood for the consumers: it returns what they took.

    An output's ``source`` is the same whatever passes ran: that of ``isolated``, or the consumer and the operand.
    """
    graph = program.graph_module.graph
    output = next(iter(reversed(graph.nodes)))
    beyond = [node for node in graph.nodes if _is_beyond(node)]
    items = [user for node in beyond for user in node.users if user.target is operator.getitem]
    returned: Any = output.args[0]
    named = {spec.source: node for spec, node in zip(program.outputs, returned, strict=True)}
    named |= {f"{node.name}.{place}": taken for node in beyond for place, taken in enumerate(node.all_input_nodes)}
    gone, results = {*beyond, *items}, dict[Node, str]()
    for source, node in named.items():
        if node not in gone and node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor):
            results.setdefault(node, source)
    output.args = (tuple(results),)
    for node in sorted(gone, reverse=True):
        graph.erase_node(node)
    dead_code(graph)
    return replace(program, outputs=tuple(OutputSpec(node.name, source) for node, source in results.items()))
