"""Shapes, strides and formats of the cache writers: a program a row, any layout a descriptor names."""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.latent_cache import cache_parts
from kimigraph.codegen.specialize.rendering import ahead_of_time, needed, padded, refuse, render
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor, parse_descriptor

STYLES = {"none": 0, "half_split": 1, "interleaved": 2, "deinterleaved": 3}
MOST_COLUMNS = 8192  # of a row that a program holds


def build_index_key(request: KernelRequest) -> KernelModule:
    """``index_key_write``; CompileError for bytes that are not whole pages or a key that exceeds a program."""
    keys, values, positions = (needed(request, name) for name in ("keys", "values", "positions"))
    table, weight, bias = (request.tensors.get(name) for name in ("block_table", "norm_weight", "norm_bias"))
    cos, sin = request.tensors.get("cos"), request.tensors.get("sin")
    rows, width = values.shape[0] * values.shape[1], values.shape[2]
    refuse_wide(request, width)
    for name, spec in (("norm_weight", weight), ("norm_bias", bias)):
        if spec is not None and spec.stride[-1] != 1:
            raise refuse(request, f"{name} is not contiguous", "pass the parameter itself, not a view of it")
    constants: dict[str, Any] = {
        "S": max(values.shape[1], 1),
        "D": width,
        **places(keys, table),
        "HALF": 0 if cos is None else cos.shape[-1],
        "STYLE": STYLES[request.attributes["rope_style"]],
        "NORM_EPS": float(request.attributes["norm_eps"]),
        "KEY_STRIDE": keys.stride,
        "VALUE_STRIDE": values.stride,
        "POSITION_STRIDE": positions.stride,
        "COS_STRIDE": (0, 0, 0) if cos is None else cos.stride,
        "SIN_STRIDE": (0, 0, 0) if sin is None else sin.stride,
        "TABLE_STRIDE": (0, 0) if table is None else table.stride,
        **planes(request, keys),
        "BLOCK_D": padded(width),
        "INTERPRET": False,
    }
    # Fused multiply-adds would round otherwise than the reference does.
    options = {
        "num_warps": 1 if width <= 256 and not constants["ROTATE"] else 4,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }
    operands: dict[str, TensorSpec | str | None] = {
        "keys": keys,
        "values": values,
        "positions": positions,
        "norm_weight": weight,
        "norm_bias": bias,
        "cos": cos,
        "sin": sin,
        "block_table": table,
    }
    text = render("index_key_write", {"grid": (rows,), "write_key": constants, "options": options})
    return KernelModule(text, (ahead_of_time("write_key", operands, constants, options),))


def build_latent(request: KernelRequest) -> KernelModule:
    """``latent_write``; CompileError for bytes that no descriptor explains or a row that exceeds a program."""
    values, positions = needed(request, "values"), needed(request, "positions")
    turned, table = request.tensors.get("rope_values"), request.tensors.get("block_table")
    cos, sin = request.tensors.get("cos"), request.tensors.get("sin")
    latent, rope, scales, columns = cache_parts(request)
    weight = request.tensors.get("norm_weight")
    if weight is not None and weight.stride[-1] != 1:
        raise refuse(request, "norm_weight is not contiguous", "pass the parameter itself, not a view of it")
    if turned is None or turned.shape[-1] == 0:
        rope = turned = None
    rows, width = values.shape[0] * values.shape[1], values.shape[2]
    refuse_wide(request, width)
    tiles = 1 if scales is None else scales.shape[-1]
    form = parse_descriptor(request.attributes["descriptor"]) if scales is not None else None
    constants: dict[str, Any] = {
        "S": max(values.shape[1], 1),
        "R": 0 if turned is None else turned.shape[-1],
        **places(latent, table),
        "STYLE": 0 if turned is None else STYLES[request.attributes["rope_style"]],
        "LATENT_STRIDE": latent.stride,
        "ROPE_STRIDE": (0, 0, 0) if rope is None else rope.stride,
        "SCALE_STRIDE": (0, 0, 0) if scales is None else scales.stride,
        "VALUE_STRIDE": values.stride,
        "ROPE_VALUE_STRIDE": (0, 0, 0) if turned is None else turned.stride,
        "POSITION_STRIDE": positions.stride,
        "COS_STRIDE": (0, 0, 0) if cos is None else cos.stride,
        "SIN_STRIDE": (0, 0, 0) if sin is None else sin.stride,
        "TABLE_STRIDE": (0, 0) if table is None else table.stride,
        "TILES": tiles,
        "TILE": width // tiles,
        "NORM_EPS": float(request.attributes.get("norm_eps", 1e-6)),
        "POWER2": isinstance(form, LatentDescriptor) and form.scales == "power2",
        "BLOCK_N": padded(tiles),
        "BLOCK_T": padded(width // tiles),
        "BLOCK_R": padded(1 if turned is None else turned.shape[-1]),
        "INTERPRET": False,
    }
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    operands: dict[str, TensorSpec | str | None] = {
        "latent": latent,
        "rope": rope,
        "scales": scales,
        "values": values,
        "rope_values": turned,
        "positions": positions,
        "cos": cos,
        "sin": sin,
        "block_table": table,
        "norm_weight": weight,
    }
    text = render("latent_write", {"columns": columns, "grid": (rows,), "write_row": constants, "options": options})
    return KernelModule(text, (ahead_of_time("write_row", operands, constants, options),))


def places(cache: TensorSpec, table: TensorSpec | None) -> dict[str, int]:
    """Positions of a sequence, and rows of a page (0 without pages)."""
    page = cache.shape[1]
    return {"T": page, "PAGE": 0} if table is None else {"T": table.shape[1] * page, "PAGE": page}


def planes(request: KernelRequest, keys: TensorSpec) -> dict[str, Any]:
    """Rows of a plane of quantised keys (0 for plain ones), and whether scales are powers of two."""
    if keys.dtype != "uint8":
        return {"PLANE": 0, "POWER2": False, "GROUP": 0, "ROTATE": False}
    form = parse_descriptor(request.attributes["descriptor"])
    assert isinstance(form, IndexKeyDescriptor)
    if tuple(keys.stride) != (keys.shape[1] * keys.shape[2], keys.shape[2], 1):
        raise refuse(request, "pages of bytes are not contiguous", "pass the cache itself, not a view of it")
    if form.group is None and form.width % 4:
        raise refuse(request, "scales do not stand at multiples of 4 bytes", "use keys of a multiple of 4 bytes")
    group = 0 if form.group is None else min(form.group, padded(form.width))
    if group & (group - 1):
        raise refuse(request, f"groups of {group} are no power of two", "choose another group in the policy")
    turned = form.rotation is not None
    return {"PLANE": keys.shape[1], "POWER2": form.scales == "power2", "GROUP": group, "ROTATE": turned}


def refuse_wide(request: KernelRequest, width: int) -> None:
    """Refuse a row that no program can hold."""
    if not 0 < width <= MOST_COLUMNS:
        raise refuse(request, f"a row of {width} columns does not fit a program", f"from 1 to {MOST_COLUMNS} fit")
