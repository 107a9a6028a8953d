"""Sparse attention in one launch on Hopper: where it serves, where it wins, how many programs share a list."""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.latent_cache import cache_parts
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, is_hopper, needed, programs_at_once, render

LATENT, ROPE, HEADS = 512, 64, 64
LEAST_HEADS = 17  # fewer leave most of a 64-row product empty


def serves(request: KernelRequest) -> bool:
    """Whether the kernel can compute the request, on whatever target: sizes, types, strides."""
    q_latent, indices = needed(request, "q_latent"), needed(request, "indices")
    q_rope = request.tensors.get("q_rope")
    latent, rope, scales, _ = cache_parts(request)
    if q_rope is None or rope is None:
        return False
    operands = (q_latent, q_rope, latent, rope)
    return (
        (q_latent.shape[-1], q_rope.shape[-1]) == (LATENT, ROPE)
        and all(spec.stride[-1] == 1 for spec in operands)
        and {spec.dtype for spec in (q_latent, q_rope, rope)} == {"bfloat16"}
        and (latent.dtype == "bfloat16" if scales is None else scales.shape[-1] == LATENT // 128)
        and 0 not in (*q_latent.shape, *indices.shape, *latent.shape)
    )


def wins(request: KernelRequest) -> bool:
    """Whether it is the faster one: on Hopper, from 17 heads on."""
    return is_hopper(request.target) and needed(request, "q_latent").shape[2] >= LEAST_HEADS


def programs_per_list(groups: int, picks: int, at_once: int) -> int:
    """A power of two: all programs of the launch run ``at_once``, each with 32 picks at least and a head to join."""
    most = min(max(at_once // groups, 1), HEADS, max(ceil_div(picks, 32), 1))
    return 1 << (most.bit_length() - 1)


def build(request: KernelRequest, *, programs: int | None = None, **chosen: int) -> KernelModule:
    """Needs ``serves(request)``; ``programs`` a list, a power of two up to 64, and ``chosen`` constants override."""
    q_latent, indices = needed(request, "q_latent"), needed(request, "indices")
    q_rope, table = (request.tensors.get(name) for name in ("q_rope", "block_table"))
    latent, rope, scales, columns = cache_parts(request)
    assert q_rope is not None and rope is not None
    batch, tokens, heads = q_latent.shape[:3]
    picks = indices.shape[-1]
    page = latent.shape[1] if table is not None else 0
    total = latent.shape[1] if table is None else table.shape[1] * page
    groups = batch * tokens * ceil_div(heads, HEADS)
    splits = programs or programs_per_list(groups, picks, programs_at_once(request.target, 1))
    share = ceil_div(picks, splits)
    block = chosen.get("BLOCK_K", 32 if share <= 32 or scales is None else 64)
    constants: dict[str, Any] = {
        "S": tokens,
        "H": heads,
        "T": total,
        "K": picks,
        "PAGE": page,
        "SCALE": float(request.attributes["scale"]),
        "Q_STRIDE": q_latent.stride,
        "Q_ROPE_STRIDE": q_rope.stride,
        "LATENT_STRIDE": latent.stride,
        "ROPE_STRIDE": rope.stride,
        "SCALE_STRIDE": (0, 0, 0) if scales is None else scales.stride,
        "INDEX_STRIDE": indices.stride,
        "TABLE_STRIDE": (0, 0) if table is None else table.stride,
        "SPLITS": splits,
        "SPLIT": ceil_div(share, block) * block,
        "BLOCK_K": block,
        "STAGES": chosen.get("STAGES", 2),
        "STAGE": -1,
        "INTERPRET": False,
    }
    options: dict[str, Any] = {"num_warps": 8, "num_stages": constants["STAGES"]}
    if splits > 1:
        options["launch_cooperative_grid"] = True
    parts = groups * splits if splits > 1 else 0
    text = render(
        "sparse_attention_hopper",
        {
            "columns": columns,
            "out": (batch, tokens, heads, LATENT),
            "lse": (batch, tokens, heads),
            "parts": (parts, HEADS, LATENT),
            "part_lse": (parts, HEADS),
            "state": groups * 32,
            "grid": (groups * splits,),
            "attend_and_join": constants,
            "options": options,
        },
    )
    operands: dict[str, TensorSpec | str | None] = {
        "q_latent": q_latent,
        "q_rope": q_rope,
        "latent": latent,
        "rope": rope,
        "scales": scales,
        "indices": indices,
        "block_table": table,
        "parts": "float32",
        "part_lse": "float32",
        "state": "int32" if splits > 1 else None,
        "out": q_latent.dtype,
        "out_lse": "float32",
    }
    return KernelModule(text, (ahead_of_time("attend_and_join", operands, constants, options),))
