"""How long a step should take at best: a roofline of one H200 over every call that starts work on the device."""

from math import prod

import torch
from torch.fx import Graph, Node

from kimigraph.codegen.launches import launches_of
from kimigraph.codegen.request import call_cost, semantic_operator
from kimigraph.ir.operators.registry import Cost, nbytes
from kimigraph.ir.purity import mutated_arguments

BYTES_PER_SECOND = 4.3e12
"""Copy rate of an H200, read and written bytes together, as measured."""

FLOPS = {torch.bfloat16: 790e12, torch.float16: 790e12, torch.float32: 67e12}
"""Operations per second: 16-bit matrix products as measured, 32-bit ones by NVIDIA's data sheet."""

LAUNCH_SECONDS = 0.93e-6
"""An empty kernel inside a CUDA graph, as measured."""

_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm"))
_LOOKUPS = frozenset(("embedding", "index", "gather", "index_select"))


def roofline(cost: Cost, dtype: torch.dtype) -> float:
    """Seconds of one call: bytes at the copy rate or FLOPs at the peak of the type, and no less than a launch."""
    peak = FLOPS.get(dtype, FLOPS[torch.float32])
    return max(cost.bytes / BYTES_PER_SECOND, cost.flops / peak, LAUNCH_SECONDS)


def estimate_step(graph: Graph) -> dict[str, float]:
    """Seconds of each call of the graph that starts work, by node name; views and assertions start none."""
    return {node.name: roofline(_cost(node), _dtype(node)) for node in graph.nodes if launches_of(node)}


def _cost(node: Node) -> Cost:
    if semantic_operator(node) is not None:
        return call_cost(node)
    inputs = [tensor for source in node.all_input_nodes for tensor in _tensors(source)]
    outputs = _tensors(node)
    if mutated_arguments(node):  # what is written is as large as what is read; the rest of the target stays
        return Cost(2 * nbytes(*inputs[1:]), 0)
    if _name(node) in _LOOKUPS:
        return Cost(2 * nbytes(*outputs), 0)
    return Cost(nbytes(*inputs, *outputs), _flops(node, inputs, outputs))


def _flops(node: Node, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    name = _name(node)
    if name in _PRODUCTS and inputs and outputs:
        return 2 * prod(outputs[0].shape) * inputs[0].shape[-1]
    if name == "scaled_dot_product_attention" and len(inputs) >= 3:
        q, k, v = inputs[:3]
        return 2 * prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    return sum(prod(tensor.shape) for tensor in outputs)


def _name(node: Node) -> str:
    return str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]


def _dtype(node: Node) -> torch.dtype:
    tensors = [tensor for source in node.all_input_nodes for tensor in _tensors(source)]
    floats = [tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point]
    return floats[0] if floats else torch.float32


def _tensors(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]
