"""Bytes of quantised caches: what references read from them and write to them."""

import torch

from kimigraph.ir.reference.e4m3 import from_e4m3, to_e4m3
from kimigraph.ir.reference.groups import join_groups, split_groups
from kimigraph.ir.reference.hadamard import hadamard_rotated
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_dequantize, mxfp8_quantize


def descriptor_fields(descriptor: str) -> dict[str, str]:
    """The fields of a descriptor's text form."""
    items = descriptor.partition("{")[2].rstrip("} ").split(",")
    return {name.strip(): value.strip() for name, _, value in (item.partition("=") for item in items)}


def quantise(values: torch.Tensor, tile: int, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., W] -> e4m3 [..., W] and fp32 scales [..., ceil(W / tile)], by which the e4m3 values are to be multiplied.

    A scale is amax / 448 of its tile, or under the rule "power2" the next power of two; amax counts as 1e-4 at least.
    The last tile is short where ``tile`` does not divide W.
    """
    tiles = split_groups(values.float(), tile)
    scales = tiles.abs().amax(dim=-1).clamp_min(1e-4) / 448.0
    if rule == "power2":
        bits = scales.view(torch.int32)
        rounded = ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
        scales = torch.where(scales.isfinite(), rounded, scales)
    return join_groups(to_e4m3(tiles / scales.unsqueeze(-1)), values.shape[-1]), scales


def dequantise(bytes_: torch.Tensor, scales: torch.Tensor, tile: int) -> torch.Tensor:
    """uint8 [..., W] holding e4m3, and fp32 [..., ceil(W / tile)] -> fp32 [..., W]."""
    tiles = split_groups(from_e4m3(bytes_), tile)
    return join_groups(tiles * scales.unsqueeze(-1), bytes_.shape[-1])


def index_key_planes(pages: torch.Tensor, descriptor: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [P, page, row] -> views: e4m3 bytes [P, page, W], and the bytes of the scales [P, page, row - W].

    Without a descriptor each key has one fp32 scale.
    """
    page, width = pages.shape[1], int(descriptor_fields(descriptor).get("width", pages.shape[2] - 4))
    flat = pages.view(pages.shape[0], -1)
    return flat[:, : page * width].view(-1, page, width), flat[:, page * width :].view(-1, page, pages.shape[2] - width)


def read_index_keys(pages: torch.Tensor, descriptor: str = "") -> torch.Tensor:
    """uint8 [P, page, row] -> fp32 [P, page, W]."""
    values, scales = index_key_planes(pages, descriptor)
    group = int(descriptor_fields(descriptor).get("group", 0))
    if group:
        return mxfp8_dequantize(values, scales, group=group)
    return dequantise(values, scales.contiguous().view(torch.float32), values.shape[-1])


def index_key_bytes(values: torch.Tensor, descriptor: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[.., W] -> what goes into the planes of ``index_key_planes``: uint8 [.., W] and [.., row - W]."""
    fields = descriptor_fields(descriptor)
    values = hadamard_rotated(values) if fields.get("rotation") == "hadamard" else values
    group = int(fields.get("group", 0))
    if group:
        return mxfp8_quantize(values, group=group)
    quantised, scales = quantise(values, values.shape[-1], fields["scales"])
    return quantised.view(torch.uint8), scales.view(torch.uint8)


def latent_columns(descriptor: str) -> tuple[slice, slice, slice]:
    """Where the e4m3 values, the fp32 scales and the bf16 rope part of a quantised row stand, in bytes."""
    fields = descriptor_fields(descriptor)
    width, rope = int(fields["width"]), 2 * int(fields["rope_dim"])
    scales = 4 * (width // int(fields["tile"]))
    end = width + scales + rope
    if fields["order"] == "scales_rope":
        return slice(0, width), slice(width, width + scales), slice(width + scales, end)
    return slice(0, width), slice(width + rope, end), slice(width, width + rope)


def read_latents(rows: torch.Tensor, descriptor: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., row] of a cache of one buffer -> fp32 latent [..., width] and rope part [..., rope_dim]."""
    if rows.dtype != torch.uint8:
        width = int(descriptor_fields(descriptor)["width"])
        return rows[..., :width].float(), rows[..., width:].float()
    values, scales, rope = latent_columns(descriptor)
    tile = int(descriptor_fields(descriptor)["tile"])
    latent = dequantise(rows[..., values], rows[..., scales].contiguous().view(torch.float32), tile)
    return latent, rows[..., rope].contiguous().view(torch.bfloat16).float()


def latent_bytes(values: torch.Tensor, rope: torch.Tensor | None, descriptor: str) -> torch.Tensor:
    """[N, width] and [N, rope_dim] -> uint8 [N, row]."""
    fields = descriptor_fields(descriptor)
    quantised, scales = quantise(values, int(fields["tile"]), fields["scales"])
    parts = [quantised.view(torch.uint8), scales.view(torch.uint8)]
    if rope is not None:
        parts.insert(
            2 if fields["order"] == "scales_rope" else 1, rope.to(torch.bfloat16).contiguous().view(torch.uint8)
        )
    return torch.cat(parts, dim=-1)
