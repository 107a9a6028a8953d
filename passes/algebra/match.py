"""What an attempt to match a pattern found: bindings, and the failures that explain a near miss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from kimigraph.passes.algebra.frames import Occurrence
from kimigraph.passes.algebra.nodes import described


def _no_leaves() -> dict[str, tuple[Occurrence, ...]]:
    return {}


def _no_numbers() -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Match:
    """What a pattern bound: leaves and results by name, numbers by name, and the nodes it stands for, in order."""

    leaves: Mapping[str, tuple[Occurrence, ...]] = field(default_factory=_no_leaves)
    numbers: Mapping[str, float] = field(default_factory=_no_numbers)
    path: tuple[Node, ...] = ()

    def leaf(self, name: str) -> Occurrence:
        """The first occurrence of that leaf."""
        return self.leaves[name][0]

    def base(self, name: str) -> Node:
        """The node below all views of that leaf."""
        return self.leaves[name][0].base

    def with_leaf(self, name: str, occurrence: Occurrence) -> "Match | None":
        """This match with one more occurrence; None when the name is bound to another tensor."""
        known = self.leaves.get(name, ())
        if known and known[0].base is not occurrence.base:
            return None
        return replace(self, leaves={**self.leaves, name: (*known, occurrence)})

    def with_number(self, name: str, value: float) -> "Match | None":
        """This match with a number; None when the name is bound to another number."""
        if name in self.numbers and self.numbers[name] != value:
            return None
        return replace(self, numbers={**self.numbers, name: value})

    def over(self, *nodes: Node) -> "Match":
        """This match standing for those nodes too."""
        return replace(self, path=(*self.path, *nodes))


@dataclass(frozen=True)
class Miss:
    """One failure of an attempt: the nodes that had matched, the node, and what was expected of it."""

    matched: tuple[Node, ...]
    node: Node
    expected: str

    @property
    def depth(self) -> int:
        """How many nodes had matched."""
        return len(self.matched)

    @property
    def reason(self) -> str:
        """The failure in words."""
        return f"expected {self.expected}, found {described(self.node)}"


@dataclass
class Trace:
    """The failures of an attempt. Trying operands in both orders makes some that mean nothing."""

    misses: list[Miss] = field(default_factory=lambda: [])

    def miss(self, match: Match, value: Any, expected: str) -> None:
        """Note a failure."""
        if isinstance(value, Node):
            self.misses.append(Miss(match.path, value, expected))

    def deepest(self, among: Callable[[Miss], bool] = lambda miss: True) -> Miss | None:
        """The first of the deepest failures for which ``among`` holds."""
        return max((miss for miss in self.misses if among(miss)), key=lambda miss: miss.depth, default=None)
