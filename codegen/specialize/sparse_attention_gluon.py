"""Attention over cache rows by specialised warps on Hopper: where it serves, how many programs share a query token."""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.latent_cache import cache_parts, length_stride
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, needed, programs_at_once, render

LATENT, ROPE, HEADS = 512, 64, 64
NO_STRIDE = (0, 0, 0)
REGISTERS = (168, 128)  # of the warps that only mix rows, and of those that bring them; the others get what is left


def serves(request: KernelRequest) -> bool:
    """Whether the kernel can compute the request on Hopper: sizes, types, strides."""
    q_latent = needed(request, "q_latent")
    q_rope, indices = request.tensors.get("q_rope"), request.tensors.get("indices")
    latent, rope, scales, _ = cache_parts(request)
    if q_rope is None or rope is None:
        return False
    operands = (q_latent, q_rope, latent, rope)
    return (
        (q_latent.shape[-1], q_rope.shape[-1]) == (LATENT, ROPE)
        and all(spec.stride[-1] == 1 and spec.aligned for spec in operands)
        and {spec.dtype for spec in (q_latent, q_rope, rope)} == {"bfloat16"}
        and (latent.dtype == "bfloat16" if scales is None else scales.shape[-1] == LATENT // 128)
        # Rows are read 32 bits at a time.
        and not any(stride % 2 for stride in rope.stride[:-1])
        and not any(stride % (4 if scales is not None else 2) for stride in latent.stride[:-1])
        and 0 not in (*q_latent.shape, *latent.shape, *(indices.shape if indices is not None else ()))
    )


def programs_per_token(tokens: int, heads: int, picks: int, at_once: int) -> int:
    """How many programs share 64 heads of a token, a power of two: all of the launch run ``at_once``, each with 32 rows
    at least and a head to join. More than 64 a token spend more on joining than they save."""
    groups = ceil_div(heads, HEADS)
    most = min(max(at_once // (tokens * groups), 1), max(HEADS // groups, 1), max(ceil_div(picks, 32), 1))
    return 1 << (most.bit_length() - 1)


def build(request: KernelRequest, *, programs: int | None = None) -> KernelModule:
    """Needs ``serves(request)``; ``programs`` a token, a power of two up to 64, overrides how many share one."""
    q_latent, q_rope = needed(request, "q_latent"), needed(request, "q_rope")
    indices, table, lengths = (request.tensors.get(name) for name in ("indices", "block_table", "lengths"))
    latent, rope, scales, columns = cache_parts(request)
    assert rope is not None
    batch, tokens, heads = q_latent.shape[:3]
    page = latent.shape[1] if table is not None else 0
    total = latent.shape[1] if table is None else table.shape[1] * page
    picks = total if indices is None else indices.shape[-1]
    groups = batch * tokens * ceil_div(heads, HEADS)
    splits = programs or programs_per_token(batch * tokens, heads, picks, programs_at_once(request.target, 1))
    share = ceil_div(picks, splits)
    rows = 32 if share <= 32 else 64
    scale_stride = NO_STRIDE if scales is None else scales.stride
    table_stride = (0, 0) if table is None else table.stride
    constants: dict[str, Any] = {
        "S": tokens,
        "H": heads,
        "K": picks,
        "CACHE": (total, page, table_stride, latent.stride, rope.stride, scale_stride),
        "SCALE": float(request.attributes["scale"]),
        "Q_STRIDE": q_latent.stride,
        "Q_ROPE_STRIDE": q_rope.stride,
        "INDEX_STRIDE": NO_STRIDE if indices is None else indices.stride,
        "LENGTH_STRIDE": length_stride(lengths),
        "SPLITS": splits,
        "SPLIT": ceil_div(share, rows) * rows,
        "SUPPLIERS": 4,
        "ROWS": rows,
        "REGISTERS": REGISTERS,
    }
    options: dict[str, Any] = {"num_warps": 4}
    if splits > 1:
        options["launch_cooperative_grid"] = True
    parts = groups * splits if splits > 1 else 0
    text = render(
        "sparse_attention_gluon",
        {
            "columns": columns,
            "listed": indices is not None,
            "route": f"specialised warps, 64 heads and {splits} programs a query token",
            "out": (batch, tokens, heads, LATENT),
            "lse": (batch, tokens, heads),
            "parts": (parts, HEADS, LATENT),
            "part_lse": (parts, HEADS),
            "state": groups * 32,
            "grid": (groups * splits,),
            "attend_with_warps": constants,
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
        "sink": request.tensors.get("sink"),
        "lengths": lengths,
        "parts": "float32",
        "part_lse": "float32",
        "state": "int32" if splits > 1 else None,
        "out": q_latent.dtype,
        "out_lse": "float32",
    }
    return KernelModule(text, (ahead_of_time("attend_with_warps", operands, constants, options),))
