"""All ranks of a program in one process: each node runs on every rank before the next one, collectives across them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from kimigraph.ir.errors import CompileError
from kimigraph.ir.own_rows import OWN_ROWS
from kimigraph.ir.ranks import rows_of


def run_ranks(graph_module: GraphModule, arguments: Sequence[Sequence[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    """The results of each rank; ``arguments`` are each rank's, for all placeholders, and are updated in place.

    CompileError for a collective that is not known here.
    """
    ranks = [Interpreter(graph_module) for _ in arguments]
    given = [iter(each) for each in arguments]
    results: list[tuple[torch.Tensor, ...]] = []
    for node in graph_module.graph.nodes:
        if node.op == "output":
            results = [tuple(map_arg(node.args[0], rank.env.__getitem__)) for rank in ranks]
        elif node.op == "placeholder":
            for rank, values in zip(ranks, given, strict=True):
                rank.env[node] = next(values)
        elif node.target is OWN_ROWS:
            for number, rank in enumerate(ranks):
                rank.env[node] = rows_of(rank.env[node.all_input_nodes[0]], len(ranks), number)
        elif "_c10d_functional" in str(node.target):
            inputs = [rank.env[node.all_input_nodes[0]] for rank in ranks]
            for rank, value in zip(ranks, _collective(node, inputs), strict=True):
                rank.env[node] = value
        else:
            for rank in ranks:
                rank.env[node] = rank.run_node(node)
    return results


def _collective(node: Node, inputs: list[Any]) -> list[Any]:
    name = str(node.target).split(".")[1]
    if name == "wait_tensor":
        return inputs
    if name == "all_reduce" and node.args[1] == "sum":
        total = inputs[0].clone()
        for value in inputs[1:]:
            total += value
        return [total.clone() for _ in inputs]
    if name == "all_gather_into_tensor":
        return [torch.cat(inputs) for _ in inputs]
    raise CompileError(f"node {node.name}: the collective {node.target} is not known to the self-test of ranks")
