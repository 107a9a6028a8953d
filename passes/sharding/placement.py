"""Where a value of the graph lies: whole on each rank, a share on each, or as addends of which the sum is the value."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch.fx import Node

from kimigraph.ir.shares import Share


class Whole(Enum):
    """Values of which a rank's tensor has the shape of the whole."""

    REPLICATED = "replicated"
    PARTIAL = "partial"


REPLICATED, PARTIAL = Whole.REPLICATED, Whole.PARTIAL
Placement = Share | Whole
Placements = Placement | tuple[Placement, ...]
"""Of a node with several results there is one each."""


class Walk(Protocol):
    """What a rule may ask of the walk over the graph (``passes.sharding.spread``)."""

    ways: int
    placed: dict[Node, Placements]
    whole: dict[Node, Any]
    reduced: dict[Node, Node]

    def of(self, value: Any) -> Placement:
        """Where an argument lies; what is no node is the same everywhere."""
        ...

    def share(self, value: Any) -> Share | None:
        """The share of an argument, None where it has none."""
        ...

    def shape(self, node: Node) -> tuple[int, ...]:
        """The shape of the whole value of a node."""
        ...


@dataclass(frozen=True)
class NotCarried(Exception):
    """An operator cannot work on the shares that it is given: they are gathered first, and the reason is told."""

    reason: str


def local_shape(shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
    """The shape that each rank has of a value of ``shape``."""
    return placement.local(shape) if isinstance(placement, Share) else shape


def described(placement: Any) -> str:
    """For messages: ``dim 1``, ``dim 2 in 3 blocks``, ``partial sums``."""
    if isinstance(placement, tuple) and not isinstance(placement, Share):
        return f"({', '.join(described(item) for item in placement)})"
    if not isinstance(placement, Share):
        return "partial sums" if placement is PARTIAL else "replicated"
    return f"dim {placement.dim}" + (f" in {placement.blocks} blocks" if placement.blocks > 1 else "")
