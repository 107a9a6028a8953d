"""Quantised caches beside the captured ones whose values they hold: the new input, its bytes, the way back, the bill.

What a cache holds is the business of its descriptor; here is how one descriptor follows from another under a policy,
with the reference quantiser and its inverse.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from kimigraph.ir.descriptors import (
    GROUP_SCALES,
    QUANTISED,
    Descriptor,
    IndexKeyDescriptor,
    LatentDescriptor,
    parse_descriptor,
)
from kimigraph.ir.policy import Format
from kimigraph.ir.program import InputSpec
from kimigraph.ir.reference.cache_bytes import (
    index_key_bytes,
    index_key_planes,
    latent_bytes,
    read_index_keys,
    read_latents,
)
from kimigraph.ir.reference.hadamard import hadamard_rotated

SEEDED_BYTES = (0, 64)
"""Bounds of seeded bytes: no code in them, of E4M3, fp32 or bf16, is negative, infinite or no number."""


def quantised_latent(cache: LatentDescriptor, form: Format) -> LatentDescriptor:
    """The descriptor of a latent cache under ``form``; a row narrower than a tile is one tile."""
    tile = min(form.group, cache.width)
    return replace(cache, dtype=QUANTISED, buffers=1, tile=tile, order=form.order, scales=form.scales)


def quantised_keys(cache: IndexKeyDescriptor, form: Format, rotation: str) -> IndexKeyDescriptor:
    """The descriptor of a cache of index keys under ``form``: one scale a key, or one for each group (MXFP8)."""
    turned = None if rotation == "none" else rotation
    if form.kind == "mxfp8":
        return replace(cache, dtype=QUANTISED, scales=GROUP_SCALES, group=form.group, rotation=turned)
    return replace(cache, dtype=QUANTISED, scales=form.scales, rotation=turned)


def quantised_spec(spec: InputSpec, descriptor: LatentDescriptor | IndexKeyDescriptor, *others: InputSpec) -> InputSpec:
    """The input that takes the place of a contiguous cache [B, T, D] or [B, 1, T, D], and of ``others`` in its rows."""
    shape = (spec.shape[0], spec.shape[-2], descriptor.row)
    return replace(
        spec,
        shape=shape,
        stride=(shape[1] * shape[2], shape[2], 1),
        dtype="uint8",
        value_range=SEEDED_BYTES,
        descriptor=str(descriptor),
        parts=tuple((one.source, one.dtype) for one in (spec, *others)),
    )


def pack(spec: InputSpec, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The bytes of the quantised cache ``spec`` that hold ``values``, captured caches by source."""
    shape = (spec.shape[0], spec.shape[1], -1)
    parts = [values[source].reshape(shape) for source, _ in spec.parts]
    packed = torch.zeros(spec.shape, dtype=torch.uint8, device=parts[0].device)
    if isinstance(parse_descriptor(spec.descriptor), IndexKeyDescriptor):
        for plane, part in zip(
            index_key_planes(packed, spec.descriptor), index_key_bytes(parts[0], spec.descriptor), strict=True
        ):
            plane.copy_(part)
        return packed
    rows = [part.flatten(0, 1) for part in parts]
    return packed.copy_(latent_bytes(rows[0], rows[1] if len(rows) > 1 else None, spec.descriptor).view(spec.shape))


def unpack(spec: InputSpec, packed: torch.Tensor) -> dict[str, torch.Tensor]:
    """The captured caches fp32 [B, T, D] that the bytes hold, by source; rotated keys turned back."""
    form = parse_descriptor(spec.descriptor)
    found: tuple[torch.Tensor, ...]
    if isinstance(form, IndexKeyDescriptor):
        keys = read_index_keys(packed, spec.descriptor)
        found = (hadamard_rotated(keys) if form.rotation else keys,)
    else:
        found = read_latents(packed, spec.descriptor)
    return {source: part for (source, _), part in zip(spec.parts, found, strict=False)}


def rounded(spec: InputSpec, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is left of captured caches, fp32 by source and in their shapes, once they went through the quantised one."""
    return {name: part.reshape(values[name].shape) for name, part in unpack(spec, pack(spec, values)).items()}


def given_to(inputs: Iterable[InputSpec], values: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of ``inputs``, in order, out of captured ones by source: quantised caches packed, others as given."""
    return [pack(spec, values) if spec.parts else values[spec.source] for spec in inputs]


def left_in(
    inputs: Iterable[InputSpec], tensors: Iterable[torch.Tensor], values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The other way: captured inputs by source, in the shapes of ``values``, out of the tensors of ``inputs``."""
    found: dict[str, torch.Tensor] = {}
    for spec, tensor in zip(inputs, tensors, strict=True):
        parts = unpack(spec, tensor) if spec.parts else {spec.source: tensor}
        found |= {name: part.reshape(values[name].shape) for name, part in parts.items()}
    return found


def cache_bill(inputs: Iterable[InputSpec]) -> dict[str, float]:
    """Bytes of a token in all latent and index-key caches, as they are and in bf16: the report's ``memory``."""
    bytes_, plain = 0.0, 0
    for spec in inputs:
        form: Descriptor | None = parse_descriptor(spec.descriptor) if spec.descriptor else None
        if not isinstance(form, LatentDescriptor | IndexKeyDescriptor):
            continue
        tokens = _tokens(spec)
        size = torch.Size(spec.shape).numel() * getattr(torch, spec.dtype).itemsize
        bytes_ += size / max(tokens, 1)
        if isinstance(form, IndexKeyDescriptor):
            plain += 2 * form.width
        elif form.buffers == 1:
            plain += 2 * (form.width + form.rope_dim)
        else:
            plain += 2 * spec.shape[-1]
    return {"cache_bytes_per_token": _whole(bytes_), "cache_bytes_per_token_bf16": plain}


def experts_bill(records: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes of all experts that a policy packed, as they are and as the model has them; empty where there are none."""
    packed = [record for record in records if record["role"] == "experts"]
    if not packed:
        return {}
    return {
        "experts_bytes": sum(record["bytes"] for record in packed),
        "experts_bytes_unpacked": sum(record["bytes_before"] for record in packed),
    }


def _tokens(spec: InputSpec) -> int:
    """Tokens that a cache has room for."""
    return spec.shape[0] * spec.shape[-2]


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number
