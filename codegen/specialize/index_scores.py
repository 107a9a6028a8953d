"""Shapes, strides and tiles of the scores of picked index keys."""

from dataclasses import replace
from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest
from kimigraph.codegen.specialize.lightning_indexer import byte_form, key_group, mixed_types
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, is_hopper, needed, padded, render

TILE = (64, 64, 256)  # picks, heads and channels of one product
TILE_FP32 = (32, 64, 32)


def decoding(request: KernelRequest) -> str:
    """How bytes become operands of a product: by instructions of Hopper to what the others are, or bit by bit."""
    q, keys = needed(request, "q"), needed(request, "keys")
    if keys.dtype != "uint8" or key_group(request) or not is_hopper(request.target):
        return "bits"
    return {"bfloat16": "bf16", "uint8": "fp16", "float8_e4m3fn": "fp16"}.get(q.dtype, "bits")


def build(request: KernelRequest) -> KernelModule:
    """One launch for ``[B, S, H, D]`` queries and ``[B, S, k]`` picks of whatever keys the plain indexer reads."""
    q, keys, weights = needed(request, "q"), needed(request, "keys"), needed(request, "weights")
    picks = needed(request, "picks")
    table, q_scales = request.tensors.get("block_table"), request.tensors.get("q_scales")
    group, mixed = byte_form(request), mixed_types(q, keys)
    if q.dtype == "float8_e4m3fn":
        q = replace(q, dtype="uint8")
    (batch, tokens, heads, width), top = q.shape, picks.shape[2]
    tile = TILE_FP32 if mixed or q.dtype == "float32" else TILE
    if width > tile[2]:
        tile = (*tile[:2], min(tile[2], 128))
    block_k, block_h, block_d = (
        min(padded(size, 16), most) for size, most in zip((top, heads, width), tile, strict=True)
    )
    constants: dict[str, Any] = {
        "S": tokens,
        "H": heads,
        "D": width,
        "K": top,
        "PAGE": keys.shape[1] if table is not None else 0,
        "SCALE": float(request.attributes["scale"]),
        "Q_STRIDE": q.stride,
        "KEY_STRIDE": keys.stride,
        "WEIGHT_STRIDE": weights.stride,
        "PICK_STRIDE": picks.stride,
        "TABLE_STRIDE": (0, 0) if table is None else table.stride,
        "BLOCK_K": block_k,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "UPCAST": mixed,
        "PLANE": keys.shape[1] if keys.dtype == "uint8" else 0,
        "GROUP": group,
        "Q_SCALE_STRIDE": (0, 0, 0, 0) if q_scales is None else q_scales.stride,
        "QUANTISES": bool(request.attributes.get("quantises_q", False)),
        "DECODED": decoding(request),
        "INTERPRET": False,
    }
    options = {"num_warps": block_k // 16, "num_stages": 1}
    text = render(
        "index_scores",
        {
            "scores": (batch, tokens, top),
            "grid": (batch * tokens * ceil_div(top, block_k),),
            "score_picks": constants,
            "options": options,
        },
    )
    operands = {"q": q, "keys": keys, "weights": weights, "picks": picks, "block_table": table, "q_scales": q_scales}
    return KernelModule(text, (ahead_of_time("score_picks", {**operands, "scores": "float32"}, constants, options),))
