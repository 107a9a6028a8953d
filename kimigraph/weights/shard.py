"""One safetensors file: its header, checked, and its tensors, mapped into memory one at a time."""

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kimigraph.ir.errors import UsageError
from kimigraph.ir.tensor_file import DTYPES

LARGEST_HEADER = 100_000_000
"""Bytes; the format allows no more."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: bytes ``begin`` to ``end`` of the file at ``path``. ``dtype`` is the file's spelling."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def read(self) -> Tensor:
        """The tensor over the file's own pages; they leave memory with it. Writing to it changes no file."""
        dtype, size = DTYPES[self.dtype], self.end - self.begin
        if size == 0:
            return torch.empty(self.shape, dtype=dtype)
        start = self.begin - self.begin % mmap.ALLOCATIONGRANULARITY
        with self.path.open("rb") as stream:
            pages = mmap.mmap(stream.fileno(), self.end - start, access=mmap.ACCESS_COPY, offset=start)
        offset = self.begin - start
        if offset % dtype.itemsize:  # a header of odd length: no dtype may lie across its natural boundary
            return torch.frombuffer(bytearray(pages[offset:]), dtype=dtype).reshape(self.shape)
        return torch.frombuffer(pages, dtype=dtype, count=size // dtype.itemsize, offset=offset).reshape(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the file, by name.

    Raises UsageError when it is no safetensors file, was cut short, or says of a tensor what cannot be: a size that is
    not that of its shape, bytes beyond the end or bytes of another tensor, a name twice.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise _unreadable(path, "its header is longer than the file")
            header = json.loads(stream.read(length).decode(), object_pairs_hook=_without_repeats)
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, " ".join(str(error).split())[:200]) from error
    if not isinstance(header, dict):
        raise _unreadable(path, "its header is no JSON object")
    records = cast(dict[str, Any], header)
    tensors = {
        name: _stored(path, name, record, 8 + length, size)
        for name, record in records.items()
        if name != "__metadata__"
    }
    end, owner = 8 + length, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin < end and tensor.end > tensor.begin:
            raise _unreadable(path, f"{name} shares bytes with {owner}")
        end, owner = max(end, tensor.end), name
    return tensors


def _stored(path: Path, name: str, record: Any, start: int, size: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = str(record["dtype"]), tuple(record["shape"]), record["data_offsets"]
        sound = all(type(number) is int and number >= 0 for number in (*shape, begin, end)) and begin <= end
    except (KeyError, TypeError, ValueError):
        sound, dtype, shape, begin, end = False, "", (), 0, 0
    if not sound:
        raise _unreadable(path, f"the header's record of {name} is malformed")
    if start + end > size:
        raise _unreadable(path, f"it was cut short: {name} ends at byte {start + end} of {size}")
    if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
        raise _unreadable(path, f"{name} has {end - begin} bytes, which is not {dtype} {list(shape)}")
    return StoredTensor(path, dtype, shape, start + begin, start + end)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"its header names {next(name for name in names if names.count(name) > 1)} twice")
    return made


def _unreadable(path: Path, reason: str) -> UsageError:
    return UsageError(f"{path} is no readable safetensors file ({reason}): copy it again")
