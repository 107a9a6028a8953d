"""Tensors on disk in the safetensors format, with torch and the standard library alone.

An artifact carries this file's text, because its program reads constants and weights where safetensors may be missing;
so it must stay self-contained.
"""

import ctypes
import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What a file calls the types of torch."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``tensors`` sorted by name, so that equal tensors give equal files; ValueError for an unknown dtype."""
    spelled = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype not in spelled:
            raise ValueError(f"{name}: a safetensors file cannot hold {tensor.dtype}")
        size = tensor.numel() * tensor.element_size()
        spelling = spelled[tensor.dtype]
        header[name] = {"dtype": spelling, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in sorted(tensors.items()):
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            stream.write(ctypes.string_at(data.data_ptr(), data.numel()) if data.numel() else b"")


def read_tensors(
    path: Path, names: Container[str] | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each entry of a file, on ``device``, one at a time; with ``names`` only those.

    Raises ValueError when the file is no safetensors file or was cut short.
    """
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is not a safetensors file, or it was cut short")
        header = json.loads(stream.read(length))
        for name, record in header.items():
            if name == "__metadata__" or (names is not None and name not in names):
                continue
            if record["dtype"] not in DTYPES:
                raise ValueError(f"{path}: {name} has the unknown dtype {record['dtype']}")
            begin, end = record["data_offsets"]
            stream.seek(8 + length + begin)
            data = bytearray(stream.read(end - begin))
            if len(data) != end - begin:
                raise ValueError(f"{path} was cut short: {name} is incomplete")
            dtype = DTYPES[record["dtype"]]
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            yield name, flat.reshape(record["shape"]).to(device)
