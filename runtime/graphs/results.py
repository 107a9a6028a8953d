"""What a replay returns: results in memory of the caller's, and results that are views of what the caller gave."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class View:
    """A result that shares memory with argument number ``place``; ``offset`` counts elements from where that begins."""

    place: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result for a call with ``arguments``."""
        given = arguments[self.place]
        return given.as_strided(self.size, self.stride, given.storage_offset() + self.offset)


@dataclass(frozen=True)
class Copy:
    """A result that lies in memory of the graph's, which the next replay of it writes again."""

    kept: torch.Tensor

    def of(self, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result in memory of its own."""
        return self.kept.clone()


@dataclass(frozen=True)
class Kept(Copy):
    """The same, handed out as it is: it holds until the next step."""

    def of(self, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result in the graph's memory."""
        return self.kept


Result = View | Copy


def results_of(
    outputs: Sequence[torch.Tensor], captured: Sequence[torch.Tensor], reuse: bool = False
) -> tuple[Result, ...]:
    """How to hand out ``outputs`` of a capture over the arguments ``captured``; no argument is kept alive by it."""
    return tuple(_result(output, captured, Kept if reuse else Copy) for output in outputs)


def _result(output: torch.Tensor, arguments: Sequence[torch.Tensor], kind: type[Copy]) -> Result:
    for place, argument in enumerate(arguments):
        if _shares(output, argument):
            offset = int(output.storage_offset() - argument.storage_offset())
            return View(place, tuple(output.shape), tuple(output.stride()), offset)
    return kind(output)


def _shares(output: torch.Tensor, argument: torch.Tensor) -> bool:
    """Whether the result begins within the argument's memory, and both count it in the same elements."""
    if output.dtype != argument.dtype or not output.numel() or not argument.numel():
        return False
    if output.untyped_storage().data_ptr() != argument.untyped_storage().data_ptr():
        return False
    reach = sum((size - 1) * step for size, step in zip(argument.shape, argument.stride(), strict=True))
    return 0 <= output.storage_offset() - argument.storage_offset() <= reach
