"""What every program must satisfy between passes. Cheap enough to run after each of them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from kimigraph.ir.descriptors import ConvDescriptor, Descriptor, StateDescriptor, parse_descriptor
from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import compute, describe
from kimigraph.ir.operators import operator_of
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.purity import mutated_arguments, region_module, storage_root
from kimigraph.ir.schemas import argument, is_plain_function

_CACHES = {
    "lightning_indexer": ("keys",),
    "index_scores": ("keys",),
    "sparse_attention": ("latent", "rope"),
    "latent_attention": ("latent", "rope"),
    "latent_write": ("latent", "rope"),
    "index_key_write": ("keys",),
}
"""The operands that the ``descriptor`` attribute of an operator describes."""


def verify(program: CapturedProgram) -> None:
    """Raise CompileError naming the node and the rule when the program breaks one.

    The rules: the graph is well formed (arguments stand before their uses, names are unique); placeholders are the
    inputs, in order, with their shapes and dtypes; every other node calls an operator, a Python operator or a region,
    and holds its value in ``meta["val"]``; the output is a tuple of ``outputs``; exactly the inputs declared mutated
    are written, never a weight; an operator reads a cache under the cache's own descriptor; and the recorded values of
    semantic operators are what their fake implementations give.
    """
    graph_module = program.graph_module
    _lint(graph_module)
    _check_inputs(program)
    _check_nodes(graph_module)
    _check_outputs(program)
    _check_writes(program)
    specs = {spec.name: spec for spec in program.inputs}
    for node in graph_module.graph.nodes:
        if operator_of(node) is not None:
            _check_value(node)
            _check_descriptors(node, specs)


def _fail(node: Node | str, rule: str) -> CompileError:
    return CompileError(f"verifier: node {node if isinstance(node, str) else node.name}: {rule}")


def _lint(graph_module: GraphModule) -> None:
    try:
        graph_module.graph.lint()
    except (RuntimeError, TypeError, ValueError) as error:
        raise CompileError(f"verifier: the graph is not well formed: {str(error).partition(chr(10))[0]}") from error


def _check_inputs(program: CapturedProgram) -> None:
    placeholders = list(program.placeholders.values())
    if [node.name for node in placeholders] != [spec.name for spec in program.inputs]:
        pairs = zip([*placeholders, None], [*program.inputs, None], strict=False)
        node, spec = next((n, s) for n, s in pairs if (n and n.name) != (s and s.name))
        raise _fail(
            node.name if node else "(none)", f"the placeholder stands where the input {spec and spec.name} should be"
        )
    for node, spec in zip(placeholders, program.inputs, strict=True):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise _fail(node, f"the placeholder's value is {describe(value)}, want a tensor")
        _check_tensor(node, value, spec)
        bound = program.tensors.get(spec.name)
        if bound is not None:
            _check_tensor(node, bound, spec)


def _check_tensor(node: Node, value: torch.Tensor, spec: InputSpec) -> None:
    if tuple(value.shape) != tuple(spec.shape) or str(value.dtype) != f"torch.{spec.dtype}":
        wanted = f"{spec.dtype}[{', '.join(str(size) for size in spec.shape)}]"
        raise _fail(node, f"holds {describe(value)}, the input {spec.source} is declared {wanted}")


def _check_outputs(program: CapturedProgram) -> None:
    output = next(iter(reversed(program.graph_module.graph.nodes)))
    results: Any = output.args[0]
    if output.op != "output" or not isinstance(results, tuple | list) or len(results) != len(program.outputs):
        raise _fail(output, f"returns {results}, want a tuple of {len(program.outputs)} results")
    for spec, result in zip(program.outputs, results, strict=True):
        if not isinstance(result, Node) or not isinstance(result.meta.get("val"), torch.Tensor):
            raise _fail(output, f"output {spec.name} is {result}, want a tensor")


def _check_nodes(graph_module: GraphModule) -> None:
    """Targets and values of all nodes, those inside regions too."""
    for node in graph_module.graph.nodes:
        if node.op == "call_module":
            child = region_module(node)
            if child is None:
                raise _fail(node, f"calls the module {node.target}; only regions (graph modules) can be called")
            _lint(child)
            _check_nodes(child)
            _check_region(node, child)
        elif node.op == "call_method":
            raise _fail(node, f"calls the tensor method {node.target}; the graph holds operators of torch.ops only")
        elif (
            node.op == "call_function"
            and not isinstance(node.target, OpOverload)
            and not is_plain_function(node.target)
        ):
            raise _fail(node, f"calls {node.target}, which is no operator of torch.ops and no Python operator")
        if node.op != "output" and "val" not in node.meta and not _returns_nothing(node):
            raise _fail(node, "has no meta['val']: a rewrite infers the values of the nodes that it makes")


def _returns_nothing(node: Node) -> bool:
    """Assertions and writes without a result have no value to record."""
    return isinstance(node.target, OpOverload) and not node.target._schema.returns


def _check_region(node: Node, child: GraphModule) -> None:
    placeholders = [inner for inner in child.graph.nodes if inner.op == "placeholder"]
    if len(placeholders) != len(node.args) or node.kwargs:
        raise _fail(node, f"gives {len(node.args)} arguments to a region of {len(placeholders)} inputs")
    for given, inner in zip(node.args, placeholders, strict=True):
        if isinstance(given, Node) and _shapes(given.meta.get("val")) != _shapes(inner.meta["val"]):
            raise _fail(node, f"gives {given.name} {describe(given.meta.get('val'))} for {describe(inner.meta['val'])}")


def _check_writes(program: CapturedProgram) -> None:
    specs = {spec.name: spec for spec in program.inputs}
    written: set[str] = set()
    for node, root in _writes(program.graph_module):
        if root.op == "get_attr":
            raise _fail(node, f"writes the constant {root.target}")
        if root.op != "placeholder":
            continue
        spec = specs[root.name]
        if spec.bound and not (spec.kind == "buffer" and spec.mutated):
            raise _fail(node, f"writes the {spec.kind} {spec.source}; only caches, inputs and buffers can be updated")
        if not spec.mutated:
            raise _fail(node, f"writes the input {spec.source}, which is not declared mutated")
        written.add(root.name)
    for spec in program.inputs:
        if spec.mutated and spec.name not in written:
            raise _fail(
                spec.name, f"the input {spec.source} is declared mutated and nothing writes it: an update was lost"
            )


def _writes(graph_module: GraphModule) -> Iterator[tuple[Node, Node]]:
    known: dict[Node, Node] = {}
    for node in graph_module.graph.nodes:
        for found in mutated_arguments(node):
            yield node, storage_root(found, known)


def _check_value(node: Node) -> None:
    """The recorded value of a semantic operator has the shapes and dtypes that its fake implementation gives."""
    value = compute(node)
    if _shapes(value) != _shapes(node.meta["val"]):
        raise _fail(node, f"holds {describe(node.meta['val'])}, its operator gives {describe(value)}")


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    # A captured call without a result holds an empty tuple.
    return tuple(_shapes(item) for item in value) if isinstance(value, list | tuple) and value else None


def _check_descriptors(node: Node, specs: dict[str, InputSpec]) -> None:
    operator = operator_of(node)
    name = operator.name if operator else ""
    for operand in _CACHES.get(name, ()):
        spec = _cache_spec(argument(node, operand), specs)
        if spec is not None and spec.descriptor and argument(node, "descriptor") != spec.descriptor:
            raise _fail(
                node,
                f"{name} takes {operand} as {argument(node, 'descriptor') or 'undescribed'}, but the cache"
                f" {spec.source} is {spec.descriptor}",
            )
    if name in ("kda_decode", "kda_decode_logged", "kda_verify", "kda_verify_states"):
        _check_states(node, specs)


def _check_states(node: Node, specs: dict[str, InputSpec]) -> None:
    """A step of KDA says its state's layout in an attribute and its window's size by shape."""
    for operand in ("state", "conv_state"):
        spec = _cache_spec(argument(node, operand), specs)
        descriptor: Descriptor | None = parse_descriptor(spec.descriptor) if spec and spec.descriptor else None
        if isinstance(descriptor, StateDescriptor) and descriptor.layout != argument(node, "state_layout"):
            raise _fail(node, f"reads the state as {argument(node, 'state_layout')!r}, the cache is {descriptor}")
        if (
            isinstance(descriptor, ConvDescriptor)
            and descriptor.columns != argument(node, operand).meta["val"].shape[-1]
        ):
            raise _fail(
                node, f"reads {argument(node, operand).meta['val'].shape[-1]} columns, the cache is {descriptor}"
            )


def _cache_spec(operand: Any, specs: dict[str, InputSpec]) -> InputSpec | None:
    return specs.get(storage_root(operand).name) if isinstance(operand, Node) else None
