"""A part of a program as a program of its own: what it needs becomes inputs, what the rest needs outputs."""

import operator
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.purity import mutated_arguments, storage_root

Ranges = Mapping[str, tuple[int, int]]
"""Value range (low inclusive, high exclusive) of integer nodes by name."""
_KEPT_META = ("val", "stack_trace", "nn_module_stack")


def extract(program: CapturedProgram, keep: Collection[str], ranges: Ranges) -> CapturedProgram:
    """The program of the nodes called ``keep``, and of those that they cannot do without.

    Tensors that come from outside become inputs of the same names (integers in ``ranges``); every kept result that is
    used outside, or was an output, becomes an output. Nodes keep names and metadata.
    """
    source = program.graph_module.graph
    kept = _closed(source, set(keep))
    inside = [node for node in source.nodes if node in kept]
    outside = dict.fromkeys(a for node in inside for a in node.all_input_nodes if a not in kept)
    results = [node for node in inside if _is_result(node, kept)]
    graph, copies = Graph(), dict[Node, Node]()
    specs = {spec.name: spec for spec in program.inputs}
    inputs: list[InputSpec] = []
    for node in sorted(outside):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        inputs.append(specs[node.name] if node.op == "placeholder" else _input(node, ranges))
    for node in inside:
        copies[node] = graph.node_copy(node, lambda argument: copies[argument])
    graph.output(tuple(copies[node] for node in results))
    written = {storage_root(found).name for node in graph.nodes for found in mutated_arguments(node)}
    return CapturedProgram(
        GraphModule(program.graph_module, graph),
        tuple(replace(spec, mutated=spec.name in written) for spec in inputs),
        tuple(OutputSpec(node.name, node.name) for node in results),
        {spec.name: program.tensors[spec.name] for spec in inputs if spec.name in program.tensors},
        info=dict(program.info),
    )


def _closed(graph: Graph, names: set[str]) -> set[Node]:
    """The nodes of these names with what must come along: producers of what is no tensor, and items of lists."""
    kept = {node for node in graph.nodes if node.name in names and node.op not in ("placeholder", "output")}
    pending = list(kept)
    while pending:
        node = pending.pop()
        needed = [a for a in node.all_input_nodes if not _is_tensor(a)]
        if not _is_tensor(node):
            needed += [user for user in node.users if user.target is operator.getitem]
        for other in needed:
            if other not in kept:
                kept.add(other)
                pending.append(other)
    return kept


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_result(node: Node, kept: set[Node]) -> bool:
    return _is_tensor(node) and any(user not in kept for user in node.users)


def _input(node: Node, ranges: Ranges) -> InputSpec:
    value: torch.Tensor = node.meta["val"]
    dtype = str(value.dtype).removeprefix("torch.")
    return InputSpec(
        node.name,
        "input",
        node.name,
        tuple(value.shape),
        tuple(value.stride()),
        dtype,
        value_range=ranges.get(node.name),
    )


def integer_ranges(program: CapturedProgram, values: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """The range of each integer tensor among ``values`` (by node name), for ``extract``."""
    return {
        name: (int(value.min()), int(value.max()) + 1)
        for name, value in values.items()
        if value.numel() and value.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
    }
