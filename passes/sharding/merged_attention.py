"""Attention over the rows that each rank has, put together: weighted by what each had of the softmax, and summed up."""

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from kimigraph.ir.mesh import COLLECTIVES, SP_GROUP
from kimigraph.passes.algebra.nodes import dtype, shape
from kimigraph.passes.algebra.rewrite import call
from kimigraph.passes.sharding.partial_sums import sum_behind

ATEN = torch.ops.aten
C10D: Any = getattr(torch.ops, COLLECTIVES)


def merge_attention(attention: Node, ways: int) -> list[Node]:
    """Make ``attention``, which gives each rank's (out, LSE), that over all rows; the collectives.

    A rank without rows has 0 and -inf, and counts as nothing; without any rows the result is 0 and -inf.
    """
    graph = attention.graph
    results: dict[int, Node] = {}
    for user in list(attention.users):
        results[cast("int", user.args[1])] = user
    for place in (0, 1):
        if place not in results:
            results[place] = call(graph, operator.getitem, (attention, place), like=attention, after=attention)
    out, lse = results[0], results[1]
    readers = [user for user in lse.users if user is not out]
    build = _Builder(graph, max(out, lse))
    gathered = build.make(C10D.all_gather_into_tensor.default, lse, ways, SP_GROUP)
    parts = build.make(C10D.wait_tensor.default, gathered)
    parts = build.make(ATEN.view.default, parts, [ways, *shape(lse)])
    most = build.make(ATEN.amax.default, parts, [0])
    most = build.make(ATEN.clamp_min.default, most, torch.finfo(torch.float32).min)  # of -inf - -inf nothing comes
    shares = build.make(ATEN.exp.default, build.make(ATEN.sub.Tensor, parts, most))
    total = build.make(ATEN.sum.dim_IntList, shares, [0])
    own = build.make(ATEN.exp.default, build.make(ATEN.sub.Tensor, lse, most))
    weight = build.make(ATEN.div.Tensor, own, build.make(ATEN.clamp_min.default, total, 1.0))
    weighted = build.make(ATEN.mul.Tensor, out, build.make(ATEN.unsqueeze.default, weight, -1))
    if dtype(weighted) != dtype(out):
        weighted = build.make(ATEN._to_copy.default, weighted, dtype=dtype(out))
    for user in list(out.users):
        if user not in build.made:
            user.replace_input_with(out, weighted)
    if readers:
        whole = build.make(ATEN.add.Tensor, most, build.make(ATEN.log.default, total))
        for user in readers:
            user.replace_input_with(lse, whole)
    return [gathered, sum_behind(weighted, SP_GROUP)]


class _Builder:
    """Calls one behind the other."""

    def __init__(self, graph: Graph, last: Node) -> None:
        self._graph, self._last = graph, last
        self.made = set[Node]()

    def make(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call behind the last one."""
        self._last = call(self._graph, target, args, kwargs, like=self._last, after=self._last)
        self.made.add(self._last)
        return self._last
