"""The kernel of an RMS norm that stands alone: generated like that of any pointwise region."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.pointwise.build import build_nodes
from kimigraph.codegen.specialize.rendering import needed
from kimigraph.ir.fake import infer
from kimigraph.ir.operators import OPERATORS


def build(request: KernelRequest) -> KernelModule:
    """One launch for any strides; ``launch`` takes x, weight and residual as the call gives them."""
    needed(request, "x")
    graph, mode = Graph(), FakeTensorMode()
    given = {name: _placeholder(graph, mode, name, spec) for name, spec in request.tensors.items() if spec is not None}
    node = graph.call_function(
        OPERATORS["rms_norm"].overload, tuple(given.get(name) for name in request.tensors), request.attributes
    )
    infer(node)
    return build_nodes([node], node, [given.get(name) for name in request.tensors])


def _placeholder(graph: Graph, mode: FakeTensorMode, name: str, spec: TensorSpec) -> Node:
    node = graph.placeholder(name)
    with mode:
        size = 1 + sum((extent - 1) * step for extent, step in zip(spec.shape, spec.stride, strict=True))
        offset = 0 if spec.aligned else 1
        storage = torch.empty(size + offset, dtype=getattr(torch, spec.dtype))
        node.meta["val"] = storage.as_strided(spec.shape, spec.stride, offset)
    return node
