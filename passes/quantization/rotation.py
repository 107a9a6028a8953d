"""The rotation of index queries, moved into the weight of the product that makes them."""

import torch
from torch.fx import Graph, Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import InputSpec
from kimigraph.passes.algebra.nodes import argument, is_view, shape
from kimigraph.passes.algebra.rewrite import call, replace

LINEAR = torch.ops.aten.linear.default


def fold_rotation(graph: Graph, q: Node, specs: dict[str, InputSpec]) -> bool:
    """Have the product that makes ``q`` [.., D] come out rotated; False where something stands between or reads it too.

    That is a product with a weight of the model, without a bias, of which nothing else sees the result: the heads are
    rows of the weight, one behind the other.
    """
    width, node = shape(q)[-1], q
    while len(node.users) == 1 and is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    if len(node.users) > 1:
        return False
    weight = argument(node, "weight") if node.target is LINEAR else None
    spec = specs.get(weight.name) if isinstance(weight, Node) and weight.op == "placeholder" else None
    if (
        spec is None
        or argument(node, "bias") is not None
        or spec.kind != "weight"
        or spec.mutated
        or shape(node)[-1] % width
    ):
        return False
    rows = [size for size in shape(q)[:-2] if size != 1]
    if [size for size in shape(node)[:-1] if size != 1] != rows or shape(q)[-2] * width != shape(node)[-1]:
        return False
    rotated = call(graph, OPERATORS["hadamard_rows"].overload, (weight,), {"width": width}, like=node, before=node)
    rotated.meta["prepared"] = True
    product = call(graph, LINEAR, (argument(node, "input"), rotated), like=node, before=node, replaces=[node])
    replace(node, product)
    graph.erase_node(node)
    return True
