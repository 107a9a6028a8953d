"""The arena of a program: one block of memory in which the tensors lie that a step makes for itself.

An artifact whose memory is planned carries this file's text as ``support/arena.py``, so it imports torch and the
standard library alone. The plan holds for one step at a time: every thread and every stream that steps run on has a
block of its own, made at the first step there and kept. A captured step takes one from the graph's pool, once.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch

MOST_BLOCKS = 16
"""Blocks that are kept; the oldest goes first, and what uses it still has it until its step is queued."""


class Arena:
    """Blocks of ``nbytes`` on a device, each with the tensors that lie in it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        self._kept: dict[tuple[int, int], Memory] = {}

    def memory(self) -> "Memory":
        """The block for one step on the current stream."""
        stream = 0
        if self.device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return Memory(self.device, self.nbytes)
            stream = torch.cuda.current_stream().cuda_stream
        key = (threading.get_ident(), stream)
        found = self._kept.get(key)
        if found is None:
            while len(self._kept) >= MOST_BLOCKS:
                self._kept.pop(next(iter(self._kept)), None)
            found = self._kept[key] = Memory(self.device, self.nbytes)
        return found


class Memory:
    """One block."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        with torch.inference_mode(False):  # made under inference mode it could not be written outside it
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._tensors: dict[Any, torch.Tensor] = {}

    def tensor(
        self, offset: int, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor that begins ``offset`` bytes into the block; contiguous where no strides are given."""
        key = (offset, tuple(shape), dtype, stride if stride is None else tuple(stride))
        found = self._tensors.get(key)
        if found is None:
            with torch.inference_mode(False):
                found = self._tensors[key] = self._made(offset, *key[1:])
        return found

    def _made(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, stride: Any) -> torch.Tensor:
        if stride is None:
            stride = torch.empty(shape, device="meta").stride()
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        typed = self._bytes[offset : offset + reach * dtype.itemsize].view(dtype)
        return typed.as_strided(shape, stride)

    def at(self, *offsets: int | None) -> "Places":
        """What a kernel's ``launch`` allocates from: its tensors begin at ``offsets``, one after the other."""
        return Places(self, offsets)


class Places:
    """Places for the tensors of one launch, in the order in which it asks; None: torch makes one outside the arena."""

    def __init__(self, memory: Memory, offsets: Sequence[int | None]) -> None:
        self._memory, self._offsets = memory, iter(offsets)

    def empty(self, shape: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As ``torch.empty``."""
        return self.empty_strided(shape, None, dtype=dtype, device=device)

    def empty_strided(self, shape: Any, stride: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As ``torch.empty_strided``."""
        offset = next(self._offsets)
        if offset is not None:
            return self._memory.tensor(offset, shape if isinstance(shape, Sequence) else (shape,), dtype, stride)
        if stride is None:
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def zeros(self, shape: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As ``torch.zeros``."""
        return self.empty(shape, dtype=dtype, device=device).zero_()
