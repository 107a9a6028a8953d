"""Attention residuals as patterns: logits of stacked sources, their softmax, the mixture, and the norm behind it.

Dims are read under letters: ``a``, ``b``, .. for those of the tokens, ``n`` for the sources, ``d`` for the channels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Node

from kimigraph.passes.algebra.delta_rule import squared
from kimigraph.passes.algebra.frames import Frame, Occurrence, Operand, operand, require_layout, row_major
from kimigraph.passes.algebra.layout import peel
from kimigraph.passes.algebra.match import Match
from kimigraph.passes.algebra.nodes import COPIES, argument, is_cast, is_view, packet, rank, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.unify import Either, Leaf, Number, Op, Pattern, Sum, find

TOKEN_AXES = "abcefgh"
DEPTH = 10
STEPS = frozenset(("mul", "div", "pow", "square", "mean", "add", "rsqrt", "sqrt", "matmul", "bmm", "mm", "sum"))


def _over_root(x: Pattern, of: Pattern, eps: str) -> Pattern:
    """x / sqrt(mean(of^2) + eps) along the channels."""
    total = Op("add", Sum(squared(of), "d", "mean"), Number(eps))
    return Either(Op("mul", x, Op("rsqrt", total)), Op("div", x, Op("sqrt", total)))


_VALUES = Leaf("values", casts="float")
_QUERY = Leaf("query", constant_along=TOKEN_AXES + "n")
_NORM = Leaf("norm_weight", constant_along=TOKEN_AXES + "n")
_WEIGHTED = Either(Op("mul", _QUERY, _NORM), _QUERY)
_NORMED = _over_root(_VALUES, _VALUES, "eps")
LOGITS = Either(
    _over_root(Sum(Op("mul", _VALUES, _WEIGHTED), "d"), _VALUES, "eps"),
    Sum(Op("mul", Op("mul", _NORMED, _NORM), _QUERY), "d"),
    Sum(Op("mul", _NORMED, _WEIGHTED), "d"),
)
MIXTURE = Sum(Op("mul", Leaf("weights", casts="float"), _VALUES), "n")
_MIXED = Leaf("mixed", casts="float")
_OUT_NORM = Leaf("out_norm_weight", constant_along=TOKEN_AXES)
NORM = Either(
    Op("mul", _over_root(_MIXED, _MIXED, "out_eps"), _OUT_NORM),
    _over_root(Op("mul", _MIXED, _OUT_NORM), _MIXED, "out_eps"),
)


@dataclass(frozen=True)
class Stack:
    """Sources side by side along a new dim ``dim`` of ``node``; each of ``parts`` is as large as ``sizes``, [.., D]."""

    node: Node
    dim: int
    parts: tuple[Node, ...]
    sizes: tuple[int, ...]

    @property
    def width(self) -> int:
        """Channels."""
        return self.sizes[-1]

    def strides(self, tokens: Sequence[int]) -> dict[str, int]:
        """Of the stacked tensor along n, d and the letters of ``tokens``: its tokens' sizes, some perhaps merged."""
        whole = torch.empty(shape(self.node), device="meta").movedim(self.dim, 0)
        try:
            view = whole.view(len(self.parts), *tokens, self.width)
        except RuntimeError as error:
            raise Refused(f"the tokens are grouped as {list(tokens)} across the sources", self.node, 1) from error
        axes = ("n", *TOKEN_AXES[: len(tokens)], "d")
        return {
            axis: stride if size > 1 else 0 for axis, size, stride in zip(axes, view.shape, view.stride(), strict=True)
        }

    def source(self, number: int) -> Operand:
        """One source as it is before it is stacked; casts that keep its values are left out."""
        part = self.parts[number]
        base, chain = peel(part)
        axes = (TOKEN_AXES + "d")[-len(self.sizes) :] if len(self.sizes) <= len(TOKEN_AXES) else ""
        frame = Frame.of(axes)
        if packet(self.node) == "cat":
            frame = Frame(tuple(axes), lambda tensor: tensor.squeeze(self.dim))
        leaf = Occurrence(part, base, tuple(chain), frame, self.node)
        return operand(f"source {number}", leaf, axes, dict(zip(axes, self.sizes, strict=True)), self.sizes)


@dataclass(frozen=True)
class Mixture:
    """A checked mixture: ``core`` is its node, ``path`` the nodes between the stack and it."""

    core: Node
    logits: Match
    path: tuple[Node, ...]
    tokens: tuple[int, ...]


def stack_of(softmax: Node) -> Stack | None:
    """The stacked sources that the weights of a softmax meet in a product; None of another softmax."""
    for node in _following(softmax, steps=frozenset()):
        if packet(node) in ("mul", "matmul", "bmm"):
            for factor in node.all_input_nodes:
                found = _stack_below(factor, _weights_size(softmax))
                if found is not None:
                    return found
    return None


def _weights_size(softmax: Node) -> int:
    dim = argument(softmax, "dim")
    sizes = shape(softmax)
    return sizes[dim] if isinstance(dim, int) and sizes else 0


def _stack_below(node: Node, count: int, depth: int = 4) -> Stack | None:
    base, _chain = peel(node, casts="float")
    found = _stack(base)
    if found is not None:
        return found if len(found.parts) == count >= 2 else None
    if depth == 0 or packet(base) not in ("mul", "div"):
        return None
    below = (_stack_below(source, count, depth - 1) for source in base.all_input_nodes)
    return next((item for item in below if item is not None), None)


def _stack(node: Node) -> Stack | None:
    if packet(node) not in ("stack", "cat"):
        return None
    parts = tuple(argument(node, "tensors"))
    dim = int(argument(node, "dim", 0)) % rank(node)
    if packet(node) == "cat" and any(shape(part)[dim] != 1 for part in parts):
        return None
    sizes = shape(node)[:dim] + shape(node)[dim + 1 :]
    return Stack(node, dim, parts, sizes) if sizes and len(sizes) <= len(TOKEN_AXES) else None


def mixture_at(softmax: Node, stack: Stack) -> Mixture:
    """The logits under a softmax over stacked sources, and the sum behind it. Refused when one is something else."""
    scores = softmax.args[0]
    assert isinstance(scores, Node)
    dim = int(argument(softmax, "dim")) % rank(softmax)
    tokens = tuple(size for place, size in enumerate(shape(softmax)) if place != dim and size > 1)
    if prod(tokens) != prod(stack.sizes[:-1]):
        raise Refused(f"the logits are {list(shape(softmax))}, one a token and source was expected", softmax, 1)
    axes = _letters(shape(softmax), dim)
    match, trace = find(LOGITS, scores, Frame(axes, lambda tensor: tensor), known(values=stack.node))
    if match is None:
        miss = trace.deepest()
        assert miss is not None
        raise Refused(f"the logits: {miss.reason}", miss.node, max(miss.depth, 1), miss.matched)
    strides = stack.strides(tokens)
    _require_values(match, stack, strides)
    core, mixed = _mixture(softmax, stack, match, tokens)
    _require_values(mixed, stack, strides)
    whole = row_major("".join(map(str, range(rank(softmax)))), dict(zip("0123456789", shape(softmax), strict=False)))
    wanted = {axis: whole[str(place)] for place, axis in enumerate(axes) if axis != "u"}
    for leaf in mixed.leaves["weights"][1:]:
        require_layout("the mixture's weights", leaf, wanted)
    between = (node for leaf in mixed.leaves["weights"] for node in leaf.chain)
    return Mixture(core, match, (*match.path, softmax, *between, *mixed.path), tokens)


def known(**leaves: Node) -> Match:
    """A match that says beforehand which tensor a leaf is; its first occurrence stands for that alone."""
    return Match({name: (Occurrence(node, node, (), Frame.of("")),) for name, node in leaves.items()})


def _letters(sizes: Sequence[int], dim: int, named: str = "n") -> tuple[str, ...]:
    """A letter for each dim: ``named`` for ``dim``, ``u`` for one of size 1, those of the tokens for the others."""
    letters = iter(TOKEN_AXES)
    return tuple(named if place == dim else "u" if size == 1 else next(letters) for place, size in enumerate(sizes))


def _require_values(match: Match, stack: Stack, strides: dict[str, int]) -> None:
    for leaf in match.leaves["values"][1:]:
        require_layout("the stacked sources", leaf, strides)


def _mixture(softmax: Node, stack: Stack, logits: Match, tokens: tuple[int, ...]) -> tuple[Node, Match]:
    """The sum of the weighted sources over them, matched from its result."""
    best: Refused | None = None
    for node in _following(softmax, STEPS):
        if packet(node) not in ("sum", "matmul", "bmm", "mm"):
            continue
        sizes = shape(node)
        if tuple(size for size in sizes if size > 1) != (*tokens, *((stack.width,) if stack.width > 1 else ())):
            continue
        channel = max((place for place, size in enumerate(sizes) if size == stack.width), default=len(sizes) - 1)
        frame = Frame(_letters(sizes, channel, "d"), lambda tensor: tensor)
        match, trace = find(MIXTURE, node, frame, known(values=stack.node, weights=softmax))
        if match is not None:
            return node, match
        miss = trace.deepest()
        if miss is not None and (best is None or miss.depth > best.score):
            best = Refused(f"the mixture: {miss.reason}", miss.node, miss.depth, miss.matched)
    score = len(logits.path)
    if best is None:
        raise Refused("the mixture is no sum of weighted sources over the sources", softmax, score, logits.path)
    raise best.raised_to(score, logits.path)


def norm_behind(core: Node, width: int) -> tuple[Node, Match] | None:
    """The RMS norm that alone reads a mixture, matched from its result; None when there is none."""
    for node in _following(core, STEPS):
        if packet(node) not in ("mul", "div") or shape(node)[-1:] != (width,):
            continue
        sizes = shape(node)
        frame = Frame(_letters(sizes, len(sizes) - 1, "d"), lambda tensor: tensor)
        match, _trace = find(NORM, node, frame, known(mixed=core))
        if match is not None and _same_places(match, core, sizes):
            return node, match
    return None


def _same_places(match: Match, core: Node, sizes: tuple[int, ...]) -> bool:
    """Whether the norm reads the mixture in its own order, channels last."""
    axes = _letters(sizes, len(sizes) - 1, "d")
    names = [f"{place}" for place in range(len(sizes))]
    whole = row_major("".join(names), dict(zip(names, sizes, strict=True)))
    wanted = {axis: whole[str(place)] for place, axis in enumerate(axes) if axis != "u"}
    try:
        for leaf in match.leaves["mixed"][1:]:
            require_layout("the mixture", leaf, wanted)
    except Refused:
        return False
    return prod(shape(core)) == prod(sizes)


def _following(start: Node, steps: frozenset[str]) -> Iterator[Node]:
    """What uses a node, through views, casts and ``steps``, near ones first; what ends a walk is given too."""
    level, seen = [start], {start}
    for _ in range(DEPTH):
        users = dict.fromkeys(user for node in level for user in node.users if user not in seen)
        seen.update(users)
        yield from users
        level = [
            user for user in users if is_view(user) or is_cast(user) or user.target in COPIES or packet(user) in steps
        ]
