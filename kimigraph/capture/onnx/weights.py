"""The weights of an ONNX file as parameters and constants of a module."""

from collections.abc import Iterable, Iterator
from math import prod

import torch

from kimigraph.adapters.onnx_file import FileGraph, FileNode, OnnxFile, StoredTensor
from kimigraph.capture.onnx.builder import ATEN, Builder, Value
from kimigraph.capture.onnx.external import read_stored


def hold_weights(build: Builder, file: OnnxFile) -> tuple[dict[str, Value], dict[int, dict[str, Value]]]:
    """Values of the graph's weights by name, and of the weights of each graph below it by the graph's ``id``."""
    right, rates = _right_operands(file), _rates(file)

    def held(tensors: Iterable[StoredTensor], top: bool) -> dict[str, Value]:
        return {
            tensor.name: _weight(build, file, tensor, top and tensor.name in right, top and tensor.name in rates)
            for tensor in tensors
        }

    bodies = [file.nodes, *(item.nodes for item in file.functions)]
    below = [graph for nodes in bodies for graph in _graphs(nodes) if graph.weights]
    return held(file.weights, True), {id(graph): held(graph.weights, False) for graph in below}


def held_weights(file: OnnxFile) -> dict[str, torch.Tensor]:
    """The parameters of the module that ``file`` becomes, whatever its sizes are."""
    build = Builder()
    hold_weights(build, file)
    return dict(build.root.named_parameters())


def _graphs(nodes: Iterable[FileNode]) -> Iterator[FileGraph]:
    for node in nodes:
        for graph in node.graphs.values():
            yield graph
            yield from _graphs(graph.nodes)


def _right_operands(file: OnnxFile) -> set[str]:
    """The names that are nothing but right operands of products."""
    right: set[str] = set()
    others = {port.name for port in file.outputs}
    for node in file.nodes:
        product = node.op == "MatMul" and not node.domain
        others.update(node.inputs[:1] if product else node.reads)
        right.update(node.inputs[1:] if product else ())
    return right - others


def _weight(build: Builder, file: OnnxFile, tensor: StoredTensor, turned: bool, rate: bool) -> Value:
    """A parameter; integers, truths and numbers are known, and what exporters fill with one number: such a tensor has
    none of a model's dotted names.

    One that products have on their right is kept [out, in], as models keep it; a rate of decay as its logarithm.
    """
    values = read_stored(file.path, tensor)
    filled = "." not in tensor.name and bool((values == values.flatten()[:1]).all())
    if not values.is_floating_point() or values.numel() == 1 or filled:
        return build.constant(values)
    if turned and values.dim() == 2:
        return build.call(ATEN.transpose.int, build.weight(tensor.name, values.t().contiguous()), 0, 1)
    if rate and bool((values.sign() == values.flatten()[0].sign()).all()) and bool((values != 0).all()):
        logarithm = build.weight(f"{tensor.name}.log", values.double().abs().log().to(values.dtype))
        size = build.call(ATEN.exp.default, logarithm)
        return size if bool((values > 0).all()) else build.call(ATEN.neg.default, size)
    return build.weight(tensor.name, values)


_VIEWS = ("Reshape", "Unsqueeze", "Squeeze", "Transpose", "Expand", "Cast", "Identity", "Flatten")


def _rates(file: OnnxFile) -> set[str]:
    """Weights of one number a head that are the rate of a gate: ``sigmoid(rate * x)``, or ``rate * softplus(x)``.

    Models have ``exp(A_log)`` there. torch.onnx' optimizer computes it, and what is left tells no gate: so the
    logarithm is taken back.
    """
    heads = {t.name for t in file.weights if len(t.shape) > 1 and t.shape[-1] == 1 and max(t.shape) == prod(t.shape)}
    made = {name: node for node in file.nodes for name in node.outputs}
    readers: dict[str, list[FileNode]] = {}
    for node in file.nodes:
        for name in node.reads:
            readers.setdefault(name, []).append(node)
    found: set[str] = set()
    for name in heads:
        users = readers.get(name, [])
        if len(users) == 1 and users[0].op == "Mul" and users[0].inputs != (name, name):
            other = next(operand for operand in users[0].inputs if operand != name)
            if _is_softplus(made, other) or _goes_to_sigmoid(readers, users[0]):
                found.add(name)
    return found


def _goes_to_sigmoid(readers: dict[str, list[FileNode]], node: FileNode) -> bool:
    users = readers.get(node.outputs[0], [])
    while len(users) == 1 and users[0].op in _VIEWS:
        users = readers.get(users[0].outputs[0], [])
    return len(users) == 1 and users[0].op == "Sigmoid"


def _is_softplus(made: dict[str, FileNode], name: str) -> bool:
    node = made.get(name)
    while node is not None and node.op in _VIEWS:
        node = made.get(node.inputs[0])
    if node is None or node.op == "Softplus":
        return node is not None
    spelled = made.get(node.inputs[-1]) if node.op == "Where" else None
    return spelled is not None and spelled.op == "Log"
