"""From a re-inplaced graph to a captured program: flat placeholders with stable names, tensor outputs alone."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kimigraph.adapters.torch_export import FunctionalGraph, LiftedInput
from kimigraph.capture.hints import CaptureHints, InputHint
from kimigraph.capture.signature import Leaf, result_leaves, unique
from kimigraph.ir.deferred import DeferredGraphModule
from kimigraph.ir.program import CapturedProgram, InputKind, InputSpec, OutputSpec


@dataclass(frozen=True)
class _Planned:
    """A placeholder to be: the nodes it stands for (several when weights are tied), and what it is."""

    nodes: tuple[Node, ...]
    source: str
    kind: InputKind
    tensor: Tensor
    hint: InputHint
    mutated: bool


def flatten(
    functional: FunctionalGraph, state: dict[str, Tensor], leaves: list[Leaf], mutated: set[str], hints: CaptureHints
) -> CapturedProgram:
    """The program of a re-inplaced graph.

    ``state`` is the model's state dict, tied names included; ``leaves`` are the call's leaves, in the order of the
    graph's arguments; ``mutated`` are the names of the placeholders that the graph writes.
    """
    planned = _bound_inputs(functional.inputs, state, mutated, hints)
    planned += _caller_inputs(functional.inputs, leaves, mutated, hints)
    graph, remap = Graph(), dict[Node, Node]()
    inputs: list[InputSpec] = []
    for item in planned:
        node = graph.placeholder(_identifier(item.source, item.kind))
        node.target = node.name
        node.meta = {"val": item.nodes[0].meta["val"]}
        remap.update(dict.fromkeys(item.nodes, node))
        inputs.append(_spec(node.name, item))
    outputs = _copy_body(functional, graph, remap, hints)
    module = DeferredGraphModule(torch.nn.Module(), graph)
    graph.lint()
    bound = {spec.name: item.tensor for spec, item in zip(inputs, planned, strict=True) if spec.bound}
    return CapturedProgram(module, tuple(inputs), outputs, bound, functional.in_spec, functional.out_spec)


def _spec(name: str, item: _Planned) -> InputSpec:
    value = item.nodes[0].meta["val"]
    return InputSpec(
        name=name,
        kind=item.kind,
        source=item.source,
        shape=tuple(int(size) for size in value.shape),
        stride=tuple(int(step) for step in value.stride()),
        dtype=str(value.dtype).removeprefix("torch."),
        mutated=item.mutated,
        value_range=item.hint.value_range,
        descriptor=item.hint.descriptor,
    )


def _bound_inputs(
    inputs: tuple[LiftedInput, ...], state: dict[str, Tensor], mutated: set[str], hints: CaptureHints
) -> list[_Planned]:
    """Weights, buffers and constants that the graph uses; tied ones share a placeholder under their first name."""
    groups: dict[tuple[Any, ...], list[LiftedInput]] = {}
    for item in inputs:
        if item.value is not None and (item.node.users or item.node.name in mutated):
            groups.setdefault(_identity(item.value), []).append(item)
    names = {_identity(tensor): name for name, tensor in reversed(list(state.items()))}
    planned: list[_Planned] = []
    for identity, group in groups.items():
        first = group[0]
        assert first.target is not None and first.value is not None
        nodes = tuple(item.node for item in group)
        written = any(node.name in mutated for node in nodes)
        source = names.get(identity, first.target).removeprefix(hints.prefix)
        planned.append(_Planned(nodes, source, _kind(first, written), first.value, InputHint(), written))
    return planned


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two names of one tensor; an empty tensor is only itself."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _kind(item: LiftedInput, written: bool) -> InputKind:
    """A checkpoint holds weights: parameters and the floating buffers of the state dict. What the model's code computes
    (buffers outside the state dict, tensor attributes) is constant; the rest are buffers."""
    value = item.value
    assert value is not None
    if written:
        return "buffer"
    if item.kind == "parameter" or (item.persistent and value.is_floating_point()):
        return "weight"
    return "buffer" if item.persistent else "constant"


def _caller_inputs(
    inputs: tuple[LiftedInput, ...], leaves: list[Leaf], mutated: set[str], hints: CaptureHints
) -> list[_Planned]:
    arguments = [item.node for item in inputs if item.kind == "argument"]
    pairs = [(node, leaf) for node, leaf in zip(arguments, leaves, strict=True) if isinstance(leaf.value, Tensor)]
    names = unique(leaf.name for _, leaf in pairs)
    planned: list[_Planned] = []
    for (node, leaf), source in zip(pairs, names, strict=True):
        written = node.name in mutated
        hint = hints.inputs.get(source, InputHint(kind="cache" if written else "input"))
        planned.append(_Planned((node,), source, hint.kind, leaf.value, hint, written))
    return planned


def _identifier(source: str, kind: InputKind) -> str:
    name = re.sub(r"\W+", "_", source).strip("_").lower()
    return f"w_{name}" if kind == "weight" else name if name[:1].isalpha() else f"{kind}_{name}"


def _copy_body(
    functional: FunctionalGraph, graph: Graph, remap: dict[Node, Node], hints: CaptureHints
) -> tuple[OutputSpec, ...]:
    results: Any = ()
    for node in functional.graph.nodes:
        if node.op == "output":
            results = node.args[0]
        elif node.op != "placeholder":
            copied = graph.node_copy(node, lambda old: remap[old])
            copied.meta = _meta(node, hints.prefix)
            remap[node] = copied
    names = result_leaves(functional.out_spec)
    tensors = [(name, remap[leaf]) for name, leaf in zip(names, results, strict=True) if isinstance(leaf, Node)]
    if len(hints.outputs) == len(tensors):
        tensors = [(name, node) for name, (_, node) in zip(hints.outputs, tensors, strict=True)]
    graph.output(tuple(node for _, node in tensors))
    return tuple(OutputSpec(node.name, source) for source, node in tensors)


def _meta(node: Node, prefix: str) -> dict[str, Any]:
    """The node's meta, module paths without the wrapper's prefix."""
    meta = {"val": None, **node.meta}  # assertions return nothing
    stack = meta.get("nn_module_stack")
    if stack and prefix:
        meta["nn_module_stack"] = {key: (path.removeprefix(prefix), kind) for key, (path, kind) in stack.items()}
    return meta
