"""Weights of an ONNX file that lie beside it: where they may lie, and reading them."""

import os
import stat
from math import prod
from pathlib import Path, PurePosixPath

import torch

from kimigraph.adapters.onnx_file import StoredTensor
from kimigraph.ir.errors import UsageError

_KEYS = {"location", "offset", "length", "checksum"}


def external_fault(model: Path, entry: dict[str, str], wanted: int) -> str:
    """What is wrong with the place of a tensor of ``wanted`` bytes; empty where it can be read.

    The place is a plain relative path below the model's own folder, links followed, and a regular file that is long
    enough.
    """
    location = entry.get("location", "")
    if set(entry) - _KEYS:
        return f"has external data with unknown keys {sorted(set(entry) - _KEYS)}"
    if not location or "\0" in location:
        return "has external data without a location"
    path = PurePosixPath(location)
    if path.is_absolute() or "\\" in location or ":" in location or ".." in path.parts:
        return f"lies in '{location}': external data is taken from below the model's own folder alone"
    root = model.resolve().parent
    found = (root / location).resolve()
    if not found.is_relative_to(root):
        return f"lies in '{location}', a link that leads out of the model's folder"
    try:
        facts = found.stat()
    except OSError:
        return f"lies in '{location}', which is not there"
    if not stat.S_ISREG(facts.st_mode):
        return f"lies in '{location}', which is no regular file"
    try:
        start, length = int(entry.get("offset") or 0), int(entry.get("length") or wanted)
    except ValueError:
        return f"has external data at offset {entry.get('offset')!r} of length {entry.get('length')!r}, no numbers"
    if length != wanted:
        return f"needs {wanted} bytes and says that it has {length}"
    if start < 0 or start + length > facts.st_size:
        return f"lies at {start} to {start + length} of '{location}', which has {facts.st_size} bytes"
    return ""


def read_stored(model: Path, tensor: StoredTensor) -> torch.Tensor:
    """The checked tensor with its values. UsageError when its file has changed since it was checked."""
    assert tensor.dtype is not None
    if 0 in tensor.shape:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    data = bytearray(tensor.data)
    if tensor.external is not None:
        data = _read(model, tensor.name, tensor.external, prod(tensor.shape) * tensor.dtype.itemsize)
    return torch.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape)


def _read(model: Path, name: str, entry: dict[str, str], length: int) -> bytearray:
    path = (model.resolve().parent / entry["location"]).resolve()
    # The path has no links left: one that came meanwhile is refused by the system.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        file.seek(int(entry.get("offset") or 0))
        data = bytearray(file.read(length))
    if len(data) != length:
        raise UsageError(f"{path} ended before the weight '{name}': it was changed while it was read")
    return data
