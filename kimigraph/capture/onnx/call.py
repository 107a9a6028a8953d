"""One node of an ONNX graph as its translation sees it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kimigraph.adapters.onnx_file import FileNode
from kimigraph.capture.onnx.builder import Builder, Value
from kimigraph.capture.onnx.numbers import shortest
from kimigraph.ir.errors import CaptureError


@dataclass(frozen=True)
class Call:
    """A node with its operands. ``attributes`` hold plain values and tensors; ``opset`` is that of its graph."""

    build: Builder
    node: FileNode
    operands: tuple[Value | None, ...]
    attributes: dict[str, Any]
    opset: int
    from_torch: bool
    """Whether torch's operators were written out to make the file."""
    may_write: Callable[[int], bool]
    """Whether the operand of that place is a state of which nobody reads the old value after this node."""

    def operand(self, place: int) -> Value:
        """An operand that must be there."""
        found = self.optional(place)
        if found is None:
            raise self.refused(f"lacks its operand {place}")
        return found

    def optional(self, place: int) -> Value | None:
        """An operand that may be left out."""
        return self.operands[place] if place < len(self.operands) else None

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute, or its default."""
        return self.attributes.get(name, default)

    def refused(self, why: str) -> CaptureError:
        """The error for a form of the operator that has no translation."""
        return CaptureError(f"node '{self.node.title}' ({self.node.op}) {why}")

    def numbers(self, place: int, name: str = "", default: list[int] | None = None) -> list[int] | None:
        """Integers that must be known now, or sizes: an operand, or in older opsets an attribute."""
        if name in self.attributes:
            return list(self.attributes[name])
        value = self.optional(place)
        if value is None:
            return default
        if value.numbers is not None:
            return list(value.numbers)
        if value.known is None:
            raise self.refused(
                f"takes sizes from values of the run (operand {place}): export it with fixed shapes, or simplify the "
                "file first"
            )
        return [int(number) for number in value.known.reshape(-1).tolist()]

    def needed(self, place: int, name: str = "") -> list[int]:
        """As ``numbers``, of what must be there."""
        found = self.numbers(place, name)
        if found is None:
            raise self.refused(f"lacks its operand {place}")
        return found

    def axis(self, rank: int, default: int) -> int:
        """The attribute ``axis``, counted from the front."""
        return self.checked_axis(int(self.attribute("axis", default)), rank)

    def checked_axis(self, axis: int, rank: int) -> int:
        """An axis counted from the front."""
        if not -max(rank, 1) <= axis < max(rank, 1):
            raise self.refused(f"has axis {axis}, its operand has {rank} axes")
        return axis % max(rank, 1)


Handler = Callable[[Call], Any]


def scalar(value: Value | None) -> Any:
    """The number that a value is known to be; None for others. Of fp32 it is the shortest decimal."""
    if value is None or value.known is None or value.known.numel() != 1:
        return None
    number = value.known.reshape(()).item()
    return shortest(number) if value.dtype == torch.float32 else number


def fits_as_number(value: Value, other: Value) -> bool:
    """Whether a value can stand as a number beside ``other``: known, and without axes that would widen the result."""
    return other.known is None and value.rank <= other.rank and scalar(value) is not None
