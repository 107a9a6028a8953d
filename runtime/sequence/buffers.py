"""The tensors of a pool: one a buffer of a layer, an entry (a page or a slot) being a row of each."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kimigraph.ir.descriptors import (
    QUANTISED,
    ConvDescriptor,
    Descriptor,
    IndexKeyDescriptor,
    LatentDescriptor,
    StateDescriptor,
    parse_descriptor,
)
from kimigraph.ir.errors import UsageError

Entry = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of one page or slot in one buffer."""

POISON = 0xFF
"""Bytes of 0xFF are NaN in bf16, fp16, fp32 and e4m3, so in the values, scales and rope parts of any layout."""


def page_entries(descriptors: Mapping[str, Descriptor | str]) -> tuple[int, dict[str, Entry]]:
    """The page size that all paged caches share, and the page of each by flat name.

    ``descriptors`` is keyed as the placeholders are: ``cache.<layer>.latent``, ``cache.<layer>.rope`` (the second
    buffer of a LatentDescriptor) and ``cache.<layer>.index_key``. UsageError, naming the cache, where one is not paged,
    is no cache, lacks its second buffer, or has another page size.
    """
    entries: dict[str, Entry] = {}
    sizes: dict[int, str] = {}
    for name, given in descriptors.items():
        descriptor = parse_descriptor(given) if isinstance(given, str) else given
        if not isinstance(descriptor, LatentDescriptor | IndexKeyDescriptor) or descriptor.layout != "paged":
            raise UsageError(f"{name}: {descriptor} is no paged cache; give latent or index_key with layout=paged")
        width = descriptor.row
        if isinstance(descriptor, LatentDescriptor) and descriptor.buffers == 2:
            base = name.removesuffix(".latent").removesuffix(".rope")
            if descriptor.rope_dim and not {f"{base}.latent", f"{base}.rope"} <= descriptors.keys():
                raise UsageError(f"{name}: {descriptor} has two buffers; name both, {base}.latent and {base}.rope")
            width = descriptor.rope_dim if name.endswith(".rope") else descriptor.width
        dtype = torch.uint8 if descriptor.dtype == QUANTISED else _dtype(descriptor.dtype)
        entries[name] = ((descriptor.page_size, width), dtype)
        sizes.setdefault(descriptor.page_size, name)
    if len(sizes) != 1:
        found = ", ".join(f"{size} ({name})" for size, name in sizes.items()) or "none"
        raise UsageError(f"caches under one page table want one page size; found {found}")
    return next(iter(sizes)), entries


def slot_entries(descriptors: Mapping[str, Descriptor | str], conv_dtype: torch.dtype) -> dict[str, Entry]:
    """The slot of each recurrent state and convolution by flat name; UsageError, naming it, for another descriptor.

    A convolution's descriptor names no type, it holds the model's: ``conv_dtype``.
    """
    entries: dict[str, Entry] = {}
    for name, given in descriptors.items():
        descriptor = parse_descriptor(given) if isinstance(given, str) else given
        match descriptor:
            case StateDescriptor(layout=layout, heads=heads, key_dim=key, value_dim=value):
                last = (key, value) if layout == "kv" else (value, key)
                entries[name] = ((heads, *last), _dtype(descriptor.dtype))
            case ConvDescriptor(channels=channels, columns=columns):
                entries[name] = ((channels, columns), conv_dtype)
            case _:
                raise UsageError(f"{name}: {descriptor} is no recurrent state; give state or conv")
    return entries


def entry_bytes(entries: Mapping[str, Entry]) -> int:
    """Bytes of one page or slot over all buffers."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in entries.values())


class Buffers:
    """``count`` zeroed entries in each buffer; what happens to an entry happens to it in all of them."""

    def __init__(self, entries: Mapping[str, Entry], count: int, device: torch.device | str) -> None:
        self.device = torch.device(device)
        # Made under inference mode they could not be written outside it.
        with torch.inference_mode(False):
            self.tensors: dict[str, Tensor] = {
                name: torch.zeros(count, *shape, dtype=dtype, device=self.device)
                for name, (shape, dtype) in entries.items()
            }

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """For each (source, destination) make the latter equal the former; no destination is a source."""
        if not pairs:
            return
        sources, destinations = (self._index(side) for side in zip(*pairs, strict=True))
        for tensor in self.tensors.values():
            tensor.index_copy_(0, destinations, tensor.index_select(0, sources))

    def clear(self, entries: Sequence[int]) -> None:
        """Fill the entries with zeros."""
        self._fill(entries, 0)

    def poison(self, entries: Sequence[int]) -> None:
        """Fill the entries with NaN."""
        self._fill(entries, POISON)

    def _fill(self, entries: Sequence[int], byte: int) -> None:
        if entries:
            index = self._index(entries)
            for tensor in self.tensors.values():
                tensor.view(torch.uint8).index_fill_(0, index, byte)

    def _index(self, entries: Sequence[int]) -> Tensor:
        return torch.tensor(entries, dtype=torch.int64, device=self.device)


def _dtype(name: str) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
