"""What is known about a tensor with a ragged axis: an axis of entries of which some may be missing.

``kimigraph.passes.cleanup.decompact`` asks whether an axis that a model compacts (``x[:, keep]``) may as well keep all
its entries. For that it follows the axis through the graph. ``Ragged`` is what it knows at each node; the rules here
say how an operator carries that knowledge on. For an operator without a rule nothing is assumed: the proof stops.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Node

from kimigraph.passes.algebra.refusal import Refused

_ATEN = torch.ops.aten

UNKNOWN = object()
"""The constant of an entry about which nothing is known."""

_ENTRYWISE: frozenset[Any] = frozenset(
    (_ATEN.__and__.Tensor, _ATEN.__or__.Tensor, _ATEN._to_copy.default, _ATEN.to.dtype, _ATEN.masked_fill.Tensor)
)
_VIEWS: frozenset[Any] = frozenset(
    (
        _ATEN.unsqueeze.default,
        _ATEN.squeeze.dim,
        _ATEN.squeeze.dims,
        _ATEN.squeeze.default,
        _ATEN.transpose.int,
        _ATEN.permute.default,
        _ATEN.select.int,
        _ATEN.slice.Tensor,
        _ATEN.expand.default,
        _ATEN.alias.default,
        _ATEN.detach.default,
    )
)
_RESHAPES: frozenset[Any] = frozenset((_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default))
_ANDS: frozenset[Any] = frozenset((_ATEN.__and__.Tensor, _ATEN.bitwise_and.Tensor, _ATEN.logical_and.default))
_ORS: frozenset[Any] = frozenset((_ATEN.__or__.Tensor, _ATEN.bitwise_or.Tensor, _ATEN.logical_or.default))


@dataclass(frozen=True)
class Ragged:
    """One axis of a tensor, counted from the right (-1 is the last).

    ``stage`` is "entries" (the compacted entries, in order) or "picks" (what a top-k picked of them, as a list whose
    order and padding may differ). ``constant`` is the value at every entry that may be missing, respectively at every
    pick that the top-k's mask refuses, or UNKNOWN. Two axes of the same ``origin`` are aligned position by position.
    """

    stage: Literal["entries", "picks"]
    axis: int
    constant: Any
    origin: Node


States = dict[Node, Ragged]


def entrywise(node: Node, states: States) -> Ragged:
    """Pointwise operators: operands must agree on the axis; constants are computed, absorbed or lost."""
    ragged = [source for source in node.all_input_nodes if source in states]
    state = states[ragged[0]]
    for source in node.all_input_nodes:
        other = states.get(source)
        if other is None:
            value = source.meta["val"]
            if isinstance(value, torch.Tensor) and value.dim() >= -state.axis and value.shape[state.axis] != 1:
                raise Refused(f"it combines the compacted axis with '{source.name}', position by position", node)
        elif (other.stage, other.axis, other.origin) != (state.stage, state.axis, state.origin):
            raise Refused("it combines two different compacted axes", node)
    return replace(state, constant=_constant(node, states))


def view(node: Node, states: States) -> Ragged:
    """Views that keep the axis whole: found by following strides through a replay on a meta tensor."""
    source = node.args[0]
    assert isinstance(source, Node)
    state = states[source]
    if node.target is not _ATEN.expand.default and any(isinstance(argument, Node) for argument in node.args[1:]):
        raise Refused("it selects by the number of compacted entries", node)
    shape = [1 if type(size) is not int else size for size in source.meta["val"].shape]
    axis = len(shape) + state.axis
    if node.target is _ATEN.slice.Tensor and _positive(node.args[1] if len(node.args) > 1 else 0, len(shape)) == axis:
        raise Refused("it cuts the compacted axis", node)
    shape[axis] = _MARK
    strides = [int(position == axis) for position in range(len(shape))]
    marked = torch.empty_strided(shape, strides, device="meta")
    assert callable(node.target)
    result = node.target(marked, *_static(node.args[1:]), **node.kwargs)
    found = [
        position for position, stride in enumerate(result.stride()) if stride == 1 and result.shape[position] == _MARK
    ]
    if len(found) != 1:
        raise Refused("it takes single entries of the compacted axis", node)
    return replace(state, axis=found[0] - result.dim())


_MARK = 7919
"""A size for the ragged axis that no model's dimension has: a prime above every head count, below every cache."""


def reshape(node: Node, states: States) -> Ragged:
    """Reshapes that keep what lies before the axis and at most merge what follows into it."""
    source = node.args[0]
    assert isinstance(source, Node)
    state = states[source]
    before, after = list(source.meta["val"].shape), list(node.meta["val"].shape)
    axis = len(before) + state.axis
    lead, trail = _product(before[:axis], node), _product(before[axis + 1 :], node)
    for position, size in enumerate(after):
        rest = after[position + 1 :]
        if (
            type(size) is not int
            and _product(after[:position], node) == lead
            and trail % max(_product(rest, node), 1) == 0
        ):
            return replace(state, axis=position - len(after))
    raise Refused("its reshape mixes the compacted axis with others", node)


def matmul(node: Node, states: States) -> Ragged:
    """A product with the axis as a free dimension: each entry's result depends on that entry alone."""
    left, right = node.args[0], node.args[1]
    assert isinstance(left, Node) and isinstance(right, Node)
    if right in states and left not in states and states[right].axis == -1 and right.meta["val"].dim() > 1:
        return replace(states[right], constant=UNKNOWN)
    if left in states and right not in states and states[left].axis != -1 and right.meta["val"].dim() > 1:
        return replace(states[left], constant=UNKNOWN)
    raise Refused("it sums over the compacted axis", node)


def concatenate(node: Node, states: States) -> Ragged:
    """Lists of picks put behind one another: positions shift, so all that is refused must hold one constant."""
    parts = node.args[0]
    assert isinstance(parts, list | tuple)
    ragged = [states[part] for part in parts if isinstance(part, Node) and part in states]
    state = ragged[0]
    dim = _positive(node.args[1] if len(node.args) > 1 else 0, node.meta["val"].dim()) - node.meta["val"].dim()
    if any(part.stage != "picks" or part.axis != dim or part.constant is UNKNOWN for part in ragged):
        raise Refused("it concatenates compacted entries whose missing ones are not masked", node)
    if len({repr(part.constant) for part in ragged}) > 1:
        raise Refused("it concatenates lists that mark a refused pick differently", node)
    return Ragged("picks", state.axis, state.constant, node)


def pad(node: Node, states: States) -> Ragged:
    """A list of picks filled up to a length with the constant that a refused pick has already."""
    source, widths = node.args[0], node.args[1]
    assert isinstance(source, Node) and isinstance(widths, list | tuple)
    state = states[source]
    mode, value = "constant", node.args[-1] if len(node.args) > 2 else node.kwargs.get("value")
    if node.target is _ATEN.pad.default:
        mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
        value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value")
    if state.axis != -1 or len(widths) != 2 or widths[0] != 0 or state.stage != "picks" or mode != "constant":
        raise Refused("it pads the compacted axis other than at its end", node)
    if state.constant is UNKNOWN or state.constant != (0 if value is None else value):
        raise Refused("it pads with another value than a refused pick holds", node)
    return Ragged("picks", -1, state.constant, node)


def scatter_add_is_safe(node: Node, states: States) -> None:
    """Raise Refused unless the sum is over integers and a refused pick adds 0: then order and padding do not matter."""
    base, dim, index, source = node.args[:4]
    assert isinstance(base, Node) and isinstance(index, Node) and isinstance(source, Node)
    if base in states or index not in states or source not in states:
        raise Refused("it adds up compacted entries", node)
    where, what = states[index], states[source]
    rank = index.meta["val"].dim()
    aligned = (where.stage, where.axis, where.origin) == (what.stage, what.axis, what.origin)
    if where.stage != "picks" or not aligned or _positive(dim, rank) - rank != where.axis:
        raise Refused("it adds up lists that do not belong together", node)
    if what.constant is UNKNOWN or what.constant != 0 or source.meta["val"].dtype.is_floating_point:
        raise Refused("a refused pick may add to the sum", node)


def rule_for(target: Any) -> Callable[[Node, States], Ragged] | None:
    """The rule of an operator whose first concern is the ragged axis itself; None when there is none."""
    if target in _VIEWS:
        return view
    if target in _RESHAPES:
        return reshape
    special: dict[Any, Callable[[Node, States], Ragged]] = {
        _ATEN.matmul.default: matmul,
        _ATEN.cat.default: concatenate,
        _ATEN.pad.default: pad,
        _ATEN.constant_pad_nd.default: pad,
    }
    if target in special:
        return special[target]
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    schema = target._schema if isinstance(target, torch._ops.OpOverload) else None
    pointwise = torch.Tag.pointwise in tags and schema is not None and not schema.is_mutable
    return entrywise if pointwise or target in _ENTRYWISE else None


def _constant(node: Node, states: States) -> Any:
    """The constant of a pointwise result, from those of its operands."""

    def known(argument: Any) -> Any:
        if isinstance(argument, Node):
            return states[argument].constant if argument in states else UNKNOWN
        return argument

    values = [known(argument) for argument in node.args]
    if node.target in _ANDS and any(value is False for value in values):
        return False
    if node.target in _ORS and any(value is True for value in values):
        return True
    if node.target is _ATEN.masked_fill.Scalar:
        return _filled(values)
    if node.target is _ATEN.where.self and values[0] in (True, False):
        return values[1] if values[0] else values[2]
    if any(value is UNKNOWN for value in values) or any(isinstance(value, Node) for value in node.kwargs.values()):
        return UNKNOWN
    tensors = [
        torch.tensor(value, dtype=argument.meta["val"].dtype) if isinstance(argument, Node) else value
        for argument, value in zip(node.args, values, strict=True)
    ]
    assert callable(node.target)
    kwargs = {key: value for key, value in node.kwargs.items() if key != "device"}
    return node.target(*tensors, **kwargs).item()


def _filled(values: list[Any]) -> Any:
    value, mask, fill = values
    if mask is True:
        return fill
    if mask is False or (value is not UNKNOWN and value == fill):
        return value
    return UNKNOWN


def _static(arguments: tuple[Any, ...]) -> list[Any]:
    """View arguments with the ragged size, which only ``expand`` may spell out, left as it is (-1)."""

    def plain(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [plain(item) for item in argument]
        return -1 if isinstance(argument, Node) else argument

    return [plain(argument) for argument in arguments]


def _product(sizes: list[Any], node: Node) -> int:
    result = 1
    for size in sizes:
        if type(size) is not int:
            raise Refused("another of its sizes is not known", node)
        result *= size
    return result


def _positive(dim: Any, rank: int) -> int:
    return int(dim) % max(rank, 1)
