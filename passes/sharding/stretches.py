"""What crosses ranks of which each has one stretch of a step's tokens, the first rank the first one."""

import operator
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.mesh import COLLECTIVES, SP_GROUP
from kimigraph.ir.own_rows import OWN_ROWS
from kimigraph.passes.algebra.nodes import argument, dtype, shape
from kimigraph.passes.algebra.rewrite import call

ATEN = torch.ops.aten
C10D: Any = getattr(torch.ops, COLLECTIVES)
ALIGNMENT = 16
"""Bytes to a multiple of which kernels hold their inputs to lie."""
CONTIGUOUS = {"memory_format": torch.contiguous_format}


class Stretches:
    """Calls in front of a node, of a rank that has one of ``ways`` stretches among those of ``group``."""

    def __init__(self, before: Node, ways: int, group: str = SP_GROUP) -> None:
        self._before, self.ways, self._group = before, ways, group

    def make(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call in front of the node."""
        return call(self._before.graph, target, args, kwargs, like=self._before, before=self._before)

    def own(self, value: Node, dim: int) -> Node:
        """Of what all ranks have the rank's part along ``dim``."""
        if dim == 0:
            own = self.make(OWN_ROWS, value, self.ways, self._group)
            # The next rank's part begins where kernels may not begin to read.
            return self.make(ATEN.clone.default, own) if own.meta["val"].nbytes % ALIGNMENT else own
        turned = self.make(ATEN.clone.default, self.make(ATEN.transpose.int, value, 0, dim), **CONTIGUOUS)
        own = self.make(ATEN.transpose.int, self.make(OWN_ROWS, turned, self.ways, self._group), 0, dim)
        return self.make(ATEN.clone.default, own, **CONTIGUOUS)

    def all(self, value: Node) -> Node:
        """What each rank has, [W, ...]."""
        source = self.make(ATEN.clone.default, value, **CONTIGUOUS)
        pending = self.make(C10D.all_gather_into_tensor.default, source, self.ways, self._group)
        whole = self.make(C10D.wait_tensor.default, pending)
        return self.make(ATEN.view.default, whole, [self.ways, *shape(value)])

    def joined(self, value: Node, dim: int) -> Node:
        """The parts of all ranks, one behind the other along ``dim``."""
        parts = self.all(value)
        return self.make(ATEN.cat.default, [self.number(parts, rank) for rank in range(self.ways)], dim)

    def number(self, parts: Node, rank: int) -> Node:
        """One of what each rank has."""
        return self.make(ATEN.select.int, parts, 0, rank)


def share_convolution(node: Node, ways: int) -> None:
    """Let ``short_conv`` begin with the last inputs in front of the stretch, and end with those behind all of them."""
    x, weight, state = node.args[:3]
    assert isinstance(x, Node) and isinstance(weight, Node)
    ranks, kept = Stretches(node, ways), shape(weight)[-1] - 1
    if state is None:
        state = ranks.make(ATEN.new_zeros.default, x, [shape(x)[0], shape(x)[2], kept])
    assert isinstance(state, Node)
    columns, tokens = shape(state)[2], shape(x)[1]
    last = ranks.make(ATEN.transpose.int, ranks.make(ATEN.slice.Tensor, x, 1, tokens - columns, tokens), 1, 2)
    if dtype(last) != dtype(state):
        last = ranks.make(ATEN._to_copy.default, last, dtype=dtype(state))
    windows = ranks.make(ATEN.cat.default, [ranks.make(ATEN.unsqueeze.default, state, 0), ranks.all(last)], 0)
    before = ranks.own(ranks.make(ATEN.slice.Tensor, windows, 0, 0, ways), 0)
    final = ranks.make(ATEN.slice.Tensor, ranks.number(windows, ways), 2, columns - kept, columns)
    final = ranks.make(ATEN.clone.default, final, **CONTIGUOUS)
    node.update_arg(2, ranks.make(ATEN.squeeze.dim, before, 0))
    _replace_result(node, 1, final)


def share_recurrence(node: Node, ways: int) -> None:
    """Let ``kda_prefill`` go on from the state in front of the stretch, and end with the one behind all of them.

    What a stretch does to a state is S <- M S + S~, so it gives q^T S + o~ of the state that comes in: S~ and o~ are
    those from zero; M and q^T M those from the identity with no values. Ranks exchange M and S~.
    """
    q, _, v, _, _, state = node.args[:6]
    assert isinstance(q, Node) and isinstance(v, Node)
    ranks, rest = Stretches(node, ways), node.args[6:]
    turned = argument(node, "state_layout") == "vk"
    (batch, tokens, heads, width), values = shape(q), shape(v)[3]
    fp32: dict[str, Any] = {"dtype": torch.float32, "device": q.meta["val"].device}
    form = [batch, heads, values, width] if turned else [batch, heads, width, values]
    nothing = ranks.make(ATEN.zeros.default, form, **fp32)
    identity = ranks.make(
        ATEN.expand.default, ranks.make(ATEN.eye.default, width, **fp32), [batch, heads, width, width]
    )
    identity = ranks.make(ATEN.clone.default, identity, **CONTIGUOUS)
    silent = ranks.make(ATEN.new_zeros.default, v, [batch, tokens, heads, width])
    own_out, own_state = _run(ranks, node, v, nothing, rest)
    read, transition = _run(ranks, node, silent, identity, rest)
    both = ranks.all(ranks.make(ATEN.cat.default, [transition, own_state], 2 if turned else 3))
    along = [state if isinstance(state, Node) else nothing]
    for rank in range(ways):
        part = ranks.number(both, rank)
        m, own = (
            ranks.make(ATEN.slice.Tensor, part, 2 if turned else 3, begin, end)
            for begin, end in ((0, width), (width, width + values))
        )
        moved = ranks.make(ATEN.matmul.default, *((along[-1], m) if turned else (m, along[-1])))
        along.append(ranks.make(ATEN.add.Tensor, moved, own))
    before = ranks.own(ranks.make(ATEN.stack.default, along[:-1], 0), 0)
    before = ranks.make(ATEN.squeeze.dim, before, 0)
    before = ranks.make(ATEN.transpose.int, before, 2, 3) if turned else before
    queries = ranks.make(ATEN._to_copy.default, ranks.make(ATEN.transpose.int, read, 1, 2), dtype=torch.float32)
    brought = ranks.make(ATEN.transpose.int, ranks.make(ATEN.matmul.default, queries, before), 1, 2)
    out = ranks.make(ATEN.add.Tensor, brought, own_out)
    out = ranks.make(ATEN._to_copy.default, out, dtype=dtype(v), **CONTIGUOUS)
    _replace_result(node, 0, out)
    _replace_result(node, 1, along[-1])


def _run(ranks: Stretches, node: Node, v: Node, state: Node, rest: tuple[Any, ...]) -> tuple[Node, Node]:
    """Output and final state of the stretch with these values from that state."""
    q, k, _, g, beta = node.args[:5]
    found = ranks.make(node.target, q, k, v, g, beta, state, *rest, **node.kwargs)
    found.meta["replaces"] = (node.name,)
    return ranks.make(operator.getitem, found, 0), ranks.make(operator.getitem, found, 1)


def _replace_result(node: Node, place: int, new: Node) -> None:
    for user in list(node.users):
        if user.args[1:] == (place,):
            user.replace_all_uses_with(new, propagate_meta=False)
