"""Regions: groups of nodes that become one kernel, held as calls of child graph modules.

A region runs as it stands, so printing, running and inferring need nothing special. It may write its inputs;
``kimigraph.ir.purity`` looks inside.
"""

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.branches import common_branch
from kimigraph.ir.deferred import DeferredGraphModule
from kimigraph.ir.errors import CompileError
from kimigraph.ir.purity import mutated_arguments, region_module, storage_root


def extract_region(graph_module: GraphModule, nodes: Collection[Node], name: str, kind: str) -> Node:
    """Move ``nodes`` into a child graph module called ``name`` and return the call_module node that runs it.

    ``kind`` (pointwise, horizontal or chain) goes into ``meta["region"]``. The child takes the nodes' outside arguments
    in order of first use and returns what is used outside: one value as it is, several as a tuple that ``getitem``
    nodes take apart. All values are copied, ``meta["replaces"]`` names the nodes. The graph module must be recompiled
    before it runs. Raises CompileError when the nodes cannot be made neighbours: a node between them needs a result of
    theirs and gives them one, or a write would change places with a use of the same storage.
    """
    graph = graph_module.graph
    members = set(nodes)
    inside = sorted(members)  # nodes compare by their place in the graph
    _check_extractable(graph_module, inside, name)
    outputs = [node for node in inside if any(user not in members for user in node.users)]
    place = _place(graph, inside, outputs)
    child, inputs = _child(graph_module, inside, outputs)
    graph_module.add_submodule(name, child)
    with graph.inserting_before(place):
        call = graph.call_module(name, tuple(inputs))
    call.meta = {key: inside[-1].meta[key] for key in ("nn_module_stack", "stack_trace") if key in inside[-1].meta}
    call.meta["region"] = kind
    branch = common_branch(inside)
    if branch:
        call.meta["branch"] = branch
    call.meta["replaces"] = tuple(node.name for node in inside)
    _connect(graph, call, outputs, members)
    for node in reversed(inside):
        graph.erase_node(node)
    return call


def inline_region(graph_module: GraphModule, call: Node) -> list[Node]:
    """Put the nodes of a region back in place of its call, under their old names where free; returns them in order.

    The child module goes when nothing else calls it. Raises CompileError when ``call`` runs no region.
    """
    graph, child = graph_module.graph, region_module(call)
    if call.op != "call_module" or child is None:
        raise CompileError(f"node {call.name} runs no region, so there is nothing to inline")
    for inner in child.graph.nodes:
        if inner.op == "call_module":
            graph_module.add_submodule(str(inner.target), child.get_submodule(str(inner.target)))
    placeholders = [node for node in child.graph.nodes if node.op == "placeholder"]
    values: dict[Node, Node] = dict(zip(placeholders, _nodes(call.args), strict=True))
    copied: list[Node] = []
    with graph.inserting_before(call):
        for node in child.graph.nodes:
            if node.op not in ("placeholder", "output"):
                values[node] = graph.node_copy(node, lambda inner: values[inner])
                copied.append(values[node])
    results: Any = next(iter(reversed(child.graph.nodes))).args[0]
    if isinstance(results, Node):
        call.replace_all_uses_with(values[results])
    else:
        for item in list(call.users):
            index: Any = item.args[1]
            item.replace_all_uses_with(values[results[index]])
            graph.erase_node(item)
    graph.erase_node(call)
    taken = {node.name for node in graph.nodes}
    for inner, node in values.items():
        # A graph never hands a name out twice, though it is free again here.
        if node in copied and inner.name not in taken:
            node.name = inner.name
    if not any(node.op == "call_module" and node.target == call.target for node in graph.nodes):
        graph_module.delete_submodule(str(call.target))
    return copied


def copy_graph_module(graph_module: GraphModule) -> GraphModule:
    """A copy that shares tensors and nothing else: nodes keep their names and metas, regions are copied too."""
    graph = Graph()
    values: dict[Node, Node] = {}
    result: Any = graph.graph_copy(graph_module.graph, values)
    output = graph.output(result)
    for old in graph_module.graph.nodes:
        (output if old.op == "output" else values[old]).meta = dict(old.meta)
    copy = DeferredGraphModule(graph_module, graph)
    copy.meta = dict(graph_module.meta)
    for name in {str(node.target) for node in graph.nodes if node.op == "call_module"}:
        child = graph_module.get_submodule(name)
        if isinstance(child, GraphModule):
            copy.add_submodule(name, copy_graph_module(child))
    return copy


def _check_extractable(graph_module: GraphModule, inside: Sequence[Node], name: str) -> None:
    if not inside:
        raise CompileError(f"region {name} has no nodes of this graph")
    if not name.isidentifier() or hasattr(graph_module, name):
        raise CompileError(f"region name {name!r} is taken or no identifier; choose another")
    for node in inside:
        if node.op not in ("call_function", "call_module", "call_method"):
            raise CompileError(f"region {name}: node {node.name} is a {node.op}, which cannot move into a region")


def _place(graph: Graph, inside: Sequence[Node], outputs: Sequence[Node]) -> Node:
    """The node to insert the call before: right after the last node of the region, else right at its first."""
    first, last = inside[0], inside[-1]
    between: list[Node] = []
    node = first
    members = set(inside)
    while node is not last:
        if node not in members:
            between.append(node)
        node = node.next
    early = next((n for n in between if any(argument in outputs for argument in n.all_input_nodes)), None)
    if early is None:
        _check_order(inside, between, lambda node, other: node < other)
        return last.next
    late = next((n for n in between if any(user in inside for user in n.users)), None)
    if late is not None:
        raise CompileError(
            f"nodes {first.name} to {last.name} cannot become one region: {early.name} between them uses a result of"
            f" theirs and {late.name} gives them an argument"
        )
    _check_order(inside, between, lambda node, other: node > other)
    return first


def _check_order(inside: Sequence[Node], between: Sequence[Node], swaps: Any) -> None:
    """Refuse a move that changes the order of a write and another use of the same storage."""
    for other in between:
        for node in inside:
            if not swaps(node, other):
                continue
            written, other_written = _written(node), _written(other)
            if (written and written & (_used(other) | other_written)) or (
                other_written and other_written & _used(node)
            ):
                raise CompileError(
                    f"node {node.name} cannot move into the region: it would pass {other.name}, and one of them writes"
                    " storage that the other uses"
                )


def _written(node: Node) -> set[Node]:
    return {storage_root(argument) for argument in mutated_arguments(node)}


def _used(node: Node) -> set[Node]:
    return {storage_root(argument) for argument in node.all_input_nodes}


def _child(
    graph_module: GraphModule, inside: Sequence[Node], outputs: Sequence[Node]
) -> tuple[GraphModule, list[Node]]:
    graph = Graph()
    copies: dict[Node, Node] = {}
    inputs: list[Node] = []
    for node in inside:
        for argument in node.all_input_nodes:
            if argument not in inside and argument not in copies:
                copies[argument] = graph.placeholder(argument.name)
                copies[argument].meta = {"val": argument.meta["val"]} if "val" in argument.meta else {}
                inputs.append(argument)
    for node in inside:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    results = tuple(copies[node] for node in outputs)
    graph.output(results[0] if len(results) == 1 else results)
    called = {str(node.target): region_module(node) for node in inside if node.op == "call_module"}
    root = torch.nn.Module()
    for target, module in called.items():
        root.add_module(target, module)
    return DeferredGraphModule(root, graph), inputs


def _connect(graph: Graph, call: Node, outputs: Sequence[Node], inside: set[Node]) -> None:
    """Let outside users of the region's results use the call instead."""

    def outside(user: Node) -> bool:
        return user is not call and user not in inside

    values = tuple(node.meta.get("val") for node in outputs)
    if len(outputs) == 1:
        call.meta["val"] = values[0]
        outputs[0].replace_all_uses_with(call, delete_user_cb=outside)
        return
    call.meta["val"] = values
    place = call.next
    for index, node in enumerate(outputs):
        with graph.inserting_before(place):
            item = graph.call_function(operator.getitem, (call, index))
        item.meta = dict(node.meta)
        node.replace_all_uses_with(item, delete_user_cb=outside)


def _nodes(values: Iterable[Any]) -> list[Node]:
    return [value for value in values if isinstance(value, Node)]
