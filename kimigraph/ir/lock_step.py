"""All ranks of a program in one process: each node runs on every rank before the next one, collectives across them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from kimigraph.ir.errors import CompileError
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.own_rows import OWN_ROWS
from kimigraph.ir.ranks import ALL_RANKS, neighbours, rows_of
from kimigraph.ir.reference.collectives import Gather, Rank, Request, Sum
from kimigraph.ir.reference.exchange_picks import exchanging
from kimigraph.ir.schemas import bind

_EXCHANGE, _SUM, _GATHER = (OPERATORS[name].overload for name in ("exchange_picks", "rank_sum", "rank_gather"))
T = TypeVar("T")


def run_ranks(
    graph_module: GraphModule, arguments: Sequence[Sequence[torch.Tensor]], mesh: Mapping[str, int] | None = None
) -> list[tuple[torch.Tensor, ...]]:
    """The results of each rank; ``arguments`` are each rank's, for all placeholders, and are updated in place.

    ``mesh``: sizes by dim, the outermost first; without one all ranks are of one group, whatever its name.
    CompileError for a collective that is not known here.
    """
    every = [tuple(range(len(arguments)))]
    groups = {ALL_RANKS: every}
    if mesh is not None:
        groups |= {f"kimigraph.{dim}": neighbours(mesh, (dim,)) for dim in mesh}
    ranks = [Interpreter(graph_module) for _ in arguments]
    given = [iter(each) for each in arguments]
    results: list[tuple[torch.Tensor, ...]] = []
    for node in graph_module.graph.nodes:
        if node.op == "output":
            results = [tuple(map_arg(node.args[0], rank.env.__getitem__)) for rank in ranks]
        elif node.op == "placeholder":
            for rank, values in zip(ranks, given, strict=True):
                rank.env[node] = next(values)
        elif node.target in (OWN_ROWS, _EXCHANGE, _SUM, _GATHER) or "_c10d_functional" in str(node.target):
            for members in groups.get(_group_of(node), every):
                among = [ranks[number] for number in members]
                for rank, value in zip(among, _together(node, among), strict=True):
                    rank.env[node] = value
        else:
            for rank in ranks:
                rank.env[node] = rank.run_node(node)
    return results


def _group_of(node: Node) -> str:
    """The name of the group that a node works among; waiting for a collective is nobody's."""
    named = node.kwargs.get("group", node.args[-1])
    return named if isinstance(named, str) else ALL_RANKS


def _together(node: Node, ranks: list[Interpreter]) -> list[Any]:
    """What a node gives to each of the ranks of one group."""
    inputs = [rank.env[node.all_input_nodes[0]] for rank in ranks]
    if node.target is OWN_ROWS:
        return [rows_of(value, len(ranks), number) for number, value in enumerate(inputs)]
    if node.target is _EXCHANGE:
        attributes = {name: value for name, value in bind(node).items() if not isinstance(value, Node)}
        places = [rank.env[node.all_input_nodes[1]] for rank in ranks]
        del attributes["group"]
        asking = [
            exchanging(scores, own, number, **attributes)
            for number, (scores, own) in enumerate(zip(inputs, places, strict=True))
        ]
        return in_lock_step(asking)[0]
    if node.target is _SUM:
        return [value.to(inputs[0].dtype) for value in _summed([value.float() for value in inputs])]
    if node.target is _GATHER:
        return [torch.cat(inputs, bind(node)["dim"]) for _ in inputs]
    return _collective(node, inputs)


def _collective(node: Node, inputs: list[Any]) -> list[Any]:
    name = str(node.target).split(".")[1]
    if name == "wait_tensor":
        return inputs
    if name == "all_reduce" and node.args[1] == "sum":
        return _summed(inputs)
    if name == "all_gather_into_tensor":
        return [torch.cat(inputs) for _ in inputs]
    if name == "all_to_all_single":
        sent = [value.split(node.args[2]) for value in inputs]
        return [torch.cat([parts[rank] for parts in sent]) for rank in range(len(inputs))]
    raise CompileError(f"node {node.name}: the collective {node.target} is not known to the self-test of ranks")


def _summed(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    total = inputs[0].clone()
    for value in inputs[1:]:
        total += value
    return [total.clone() for _ in inputs]


def in_lock_step(ranks: Sequence[Rank[T]]) -> tuple[list[T], int]:
    """The results of all ranks' code, driven together, and the bytes that they put on the wire.

    Each rank counts what it contributes to a collective once. CompileError where ranks ask for different collectives.
    """
    results: dict[int, T] = {}
    answer: torch.Tensor | None = None
    sent = 0
    while True:
        requests: list[Request] = []
        for number, rank in enumerate(ranks):
            try:
                requests.append(next(rank) if answer is None else rank.send(answer))
            except StopIteration as end:
                results[number] = end.value
        if not requests:
            return [results[number] for number in range(len(ranks))], sent
        forms = {(type(one), tuple(one.tensor.shape), one.tensor.dtype) for one in requests}
        if len(requests) < len(ranks) or len(forms) > 1:
            raise CompileError(f"ranks ask for different collectives: {len(requests)} of {len(ranks)}, {forms}")
        answer = _answer(type(requests[0]), torch.stack([one.tensor for one in requests]))
        sent += sum(one.tensor.numel() * one.tensor.element_size() for one in requests)


def _answer(kind: type[Request], stacked: torch.Tensor) -> torch.Tensor:
    if kind is Gather:
        return stacked
    return stacked.sum(0, dtype=stacked.dtype) if kind is Sum else stacked.amax(0)
