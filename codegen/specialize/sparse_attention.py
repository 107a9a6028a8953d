"""Which sparse attention kernel serves a request, and its shapes, strides, tiles and split counts.

One launch on Hopper at the published sizes; plain Triton, in one launch or two, for everything else.
"""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize import sparse_attention_gluon
from kimigraph.codegen.specialize.latent_cache import cache_parts, length_stride
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, is_hopper, needed, padded, refuse, render

PROGRAMS = 128  # about one a streaming multiprocessor: fewer leave some idle, more only add partial results
MOST_SPLITS = 64
ACCUMULATORS = 64 * 512  # fp32 output tile of one program: half of the register file of one SM
SHARED_BYTES = 224 * 1024  # queries and gathered rows of one program; an SM of sm_90 has 227 KiB
MERGE_TILE = 8192
LEAST_HEADS, MANY_ROWS = 17, 16
"""From so many heads, or rows, on specialised warps are faster: few rows of few heads leave most of a product empty."""


def tile(request: KernelRequest, rows: int, picks: int, paged: bool, itemsize: int) -> tuple[dict[str, int], int]:
    """Heads, latent columns, rope columns and picks that a program holds at once, and the loads it keeps in flight."""
    heads, width = needed(request, "q_latent").shape[-2:]
    q_rope = request.tensors.get("q_rope")
    block_l, block_r = padded(width, 16), padded(0 if q_rope is None else q_rope.shape[-1], 16)
    # fp32 products keep their operands in registers. From 17 heads on a 16-bit tile fills a warp-group product.
    most_heads = max(ACCUMULATORS // block_l // (1 if itemsize == 2 else 4), 16)
    block_h = min(16 if heads <= 16 else 64 if itemsize == 2 else 32, most_heads)
    # Long parts want large steps; the addresses of pages take the registers that a large step needs.
    long = itemsize == 2 and not paged and picks >= 64 * programs_per_row(rows * ceil_div(heads, block_h))
    for block_k, stages in (((64, 2),) if long else ()) + (((32, 2),) if itemsize == 2 else ()) + ((16, 2), (16, 1)):
        block_k = min(padded(picks, 16), block_k)
        if (
            itemsize * (block_h + stages * block_k) * (block_l + block_r) <= SHARED_BYTES
            and block_h * block_l <= ACCUMULATORS
        ):
            return {"BLOCK_K": block_k, "BLOCK_H": block_h, "BLOCK_L": block_l, "BLOCK_R": block_r}, stages
    raise refuse(request, f"a latent of {width} columns exceeds a tile", "at most 2048 of 16 bits or 1024 of fp32 fit")


def programs_per_row(rows: int) -> int:
    """How many programs should share the list of each of ``rows`` (index row, head group) pairs."""
    return min(max(PROGRAMS // max(rows, 1), 1), MOST_SPLITS)


def split(rows: int, picks: int, block_k: int, splits: int | None) -> tuple[int, int]:
    """How many programs share a row's list, and how many picks each takes (a multiple of the tile)."""
    blocks = max(ceil_div(picks, block_k), 1)
    wanted = programs_per_row(rows) if splits is None else splits
    each = ceil_div(blocks, min(wanted, blocks)) * block_k
    return max(ceil_div(picks, each), 1), each


def build(request: KernelRequest, *, splits: int | None = None, programs: int | None = None) -> KernelModule:
    """Absorbed queries ``[B, S, H, L]`` over listed rows, or without ``indices`` over all visible ones.

    ``splits`` overrides the number of programs a query of the plain kernel; ``programs`` asks for the kernel of
    specialised warps, with that many, wherever it can serve.
    """
    if request.op == "sparse_attention":
        needed(request, "indices")
    if sparse_attention_gluon.serves(request) and (programs is not None or wins(request)):
        return sparse_attention_gluon.build(request, programs=programs)
    return build_plain(request, splits)


def wins(request: KernelRequest) -> bool:
    """Whether specialised warps are the faster form: on Hopper, with heads to fill a product of 64, or many rows, or
    rows in fp8, which the plain kernel takes apart a number at a time (16 heads, 16 rows: 1,259 us for 27)."""
    batch, tokens, heads = needed(request, "q_latent").shape[:3]
    fp8 = needed(request, "latent").dtype == "uint8"
    return is_hopper(request.target) and (heads >= LEAST_HEADS or batch * tokens >= MANY_ROWS or fp8)


def build_plain(request: KernelRequest, splits: int | None) -> KernelModule:
    """Any sizes that fit a tile."""
    q_latent = needed(request, "q_latent")
    names = ("q_rope", "indices", "lengths", "block_table", "sink")
    q_rope, indices, lengths, table, sink = (request.tensors.get(name) for name in names)
    latent, rope, scales, columns = cache_parts(request)
    batch, tokens, heads, width = q_latent.shape
    rope_width = 0 if q_rope is None else q_rope.shape[-1]
    if rope_width == 0:
        q_rope = rope = None
    page = latent.shape[1] if table is not None else 0
    total = latent.shape[1] if table is None else table.shape[1] * page
    picks = total if indices is None else indices.shape[-1]
    dtypes = {spec.dtype for spec in (q_latent, q_rope, latent, rope) if spec is not None}
    if scales is not None:
        dtypes = dtypes - {"uint8"} | {"bfloat16"}
    mixed = len(dtypes) > 1
    itemsize = 4 if mixed or "float32" in dtypes else 2
    blocks, stages = tile(request, batch * tokens, picks, table is not None, itemsize)
    groups = ceil_div(heads, blocks["BLOCK_H"])
    parts, each = split(batch * tokens * groups, picks, blocks["BLOCK_K"], splits)
    attend: dict[str, Any] = {
        "S": tokens,
        "H": heads,
        "L": width,
        "R": rope_width,
        "T": total,
        "K": picks,
        "PAGE": page,
        "SCALE": float(request.attributes["scale"]),
        "Q_STRIDE": q_latent.stride,
        "Q_ROPE_STRIDE": (0, 0, 0, 0) if q_rope is None else q_rope.stride,
        "LATENT_STRIDE": latent.stride,
        "ROPE_STRIDE": (0, 0, 0) if rope is None else rope.stride,
        "SCALE_STRIDE": (0, 0, 0) if scales is None else scales.stride,
        "SCALED": 0 if scales is None else width // scales.shape[-1],
        "INDEX_STRIDE": (0, 0, 0) if indices is None else indices.stride,
        "LENGTH_STRIDE": length_stride(lengths),
        "TABLE_STRIDE": (0, 0) if table is None else table.stride,
        "SPLITS": parts,
        "SPLIT": each,
        **blocks,
        "UPCAST": mixed,
        "INTERPRET": False,
    }
    attend_options = {"num_warps": 8 if blocks["BLOCK_H"] * blocks["BLOCK_L"] >= 16384 else 4, "num_stages": stages}
    merge = None if parts == 1 else merge_constants(heads, width, parts)
    merge_options = {"num_warps": 4, "num_stages": 1}
    constants: dict[str, Any] = {
        "out": (batch, tokens, heads, width),
        "lse": (batch, tokens, heads),
        "parts": (batch * tokens, parts, heads, width),
        "part_lse": (batch * tokens, parts, heads),
        "attend_grid": (batch * tokens * parts, groups),
        "attend_split": attend,
        "attend_options": attend_options,
        "merge_splits": merge,
        "columns": columns,
        "listed": indices is not None,
        "route": f"plain, {blocks['BLOCK_H']} heads and {parts} programs a query token",
    }
    operands: dict[str, TensorSpec | str | None] = {
        "q_latent": q_latent,
        "q_rope": q_rope,
        "latent": latent,
        "rope": rope,
        "scales": scales,
        "indices": indices,
        "block_table": table,
        "sink": sink,
        "lengths": lengths,
        "out": q_latent.dtype if merge is None else "float32",
        "out_lse": "float32",
    }
    launches = [ahead_of_time("attend_split", operands, attend, attend_options)]
    if merge is not None:
        merge_groups = ceil_div(heads, merge["BLOCK_H"])
        constants["merge_grid"] = (batch * tokens * merge_groups, ceil_div(width, merge["BLOCK_L"]))
        constants["merge_options"] = merge_options
        results: dict[str, TensorSpec | str | None] = {
            "parts": "float32",
            "part_lse": "float32",
            "sink": sink,
            "out": q_latent.dtype,
            "out_lse": "float32",
        }
        launches.append(ahead_of_time("merge_splits", results, merge, merge_options))
    return KernelModule(render("sparse_attention", constants), tuple(launches))


def merge_constants(heads: int, width: int, parts: int) -> dict[str, Any]:
    """A merging program reads all parts of some heads and columns in one tile, so that one latency covers them."""
    block_p = padded(parts)
    block_l = min(padded(width), max(MERGE_TILE // block_p, 1))
    block_h = min(padded(heads), max(MERGE_TILE // (block_p * block_l), 1))
    blocks = {"BLOCK_P": block_p, "BLOCK_H": block_h, "BLOCK_L": block_l}
    return {"H": heads, "L": width, "SPLITS": parts, **blocks, "INTERPRET": False}
