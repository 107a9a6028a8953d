"""The Lightning Indexer in one launch on Hopper: where it serves, where it wins, how many programs share a row."""

from typing import Any

from kimigraph.codegen.kernel import KernelLaunch, KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import ahead_of_time, is_hopper, needed, padded, programs_at_once, render

PAGE = 64
WIDTH = 128
PROGRAMS = 4  # that fit a multiprocessor at once
MOST_ROWS = 256
MOST_CANDIDATES = 128
MOST_TILE = 1024  # codes a step of the selection
LEVELS = 4
HEADER = 128  # words before the histograms of a row: counters, each in a cache line of its own
MOST_KEYS = 1 << 24  # a histogram's counts


def serves(request: KernelRequest) -> bool:
    """Whether the kernel can compute the request, on whatever target: sizes, types, strides."""
    if not fit_a_few_rows(request) or request.attributes.get("rows", False):
        return False
    keys, table = needed(request, "keys"), request.tensors.get("block_table")
    return (keys.shape[1] if table is None else table.shape[1] * keys.shape[1]) < MOST_KEYS


def fit_a_few_rows(request: KernelRequest) -> bool:
    """Whether the operands are what both forms for a few rows take: page by page, in heads of 128."""
    q, keys, weights = needed(request, "q"), needed(request, "keys"), needed(request, "weights")
    table = request.tensors.get("block_table")
    heads, width = q.shape[-2:]
    total = keys.shape[1] if table is None else table.shape[1] * keys.shape[1]
    types = {("bfloat16", "bfloat16"), ("float8_e4m3fn", "uint8")}
    paged = table is not None and keys.shape[1] == PAGE
    return (
        request.tensors.get("mask") is None
        and (q.dtype, keys.dtype) in types
        and (paged or (table is None and keys.dtype == "bfloat16" and total % PAGE == 0))
        and width == WIDTH
        and heads in (16, 32, 64, 128)
        and tuple(keys.stride) == (keys.shape[1] * keys.shape[2], keys.shape[2], 1)
        and q.stride[-1] == 1
        and 0 < q.shape[0] * q.shape[1] <= MOST_ROWS
        and total > 0
        and 0 < int(request.attributes["k"]) <= 8192
        and weights.dtype in ("float32", "bfloat16", "float16")
    )


def wins(request: KernelRequest) -> bool:
    """Whether it is the faster one: on Hopper, always, if all rows fit the device at once."""
    rows = needed(request, "q").shape[0] * needed(request, "q").shape[1]
    return is_hopper(request.target) and rows <= programs_at_once(request.target, PROGRAMS)


def programs_per_row(rows: int, pages: int, at_once: int) -> int:
    """A power of two: all programs of the launch run ``at_once``, and from 256 pages on each has two pages at least."""
    most = at_once // rows
    useful = pages if pages <= 128 else pages // 2
    return 1 << (max(min(most, useful), 1).bit_length() - 1)


def build(request: KernelRequest, *, splits: int | None = None) -> KernelModule:
    """Needs ``serves(request)``; ``splits`` overrides the number of programs a row, a power of two."""
    q, keys, weights = needed(request, "q"), needed(request, "keys"), needed(request, "weights")
    lengths, table = request.tensors.get("lengths"), request.tensors.get("block_table")
    batch, tokens, heads = q.shape[:3]
    rows = batch * tokens
    total = keys.shape[1] if table is None else table.shape[1] * PAGE
    top = int(request.attributes["k"])
    splits = splits or programs_per_row(rows, total // PAGE, programs_at_once(request.target, PROGRAMS))
    pages_each = -(-(total // PAGE) // splits)
    tile = min(max(padded(pages_each * PAGE), 128), MOST_TILE)
    quantised = keys.dtype == "uint8"
    words = HEADER + LEVELS * 4096
    constants: dict[str, Any] = {
        "S": tokens,
        "T": total,
        "H": heads,
        "K": top,
        "SCALE": float(request.attributes["scale"]),
        "Q_STRIDE": q.stride,
        "WEIGHT_STRIDE": weights.stride,
        "LENGTH_STRIDE": 0 if lengths is None or lengths.shape in ((), (1,)) else lengths.stride[0],
        "TABLE_STRIDE": (0, 0) if table is None else table.stride,
        "PAGED": table is not None,
        "QUANTISED": quantised,
        "SPLITS": splits,
        "MOST": MOST_CANDIDATES,
        "TILE": tile,
        "ONE": pages_each * PAGE <= tile,
        "SEGMENTS": 1 if 2 * top > total // 4 or pages_each < 8 else 2 if pages_each < 128 else 3,
        "STEP": 2 if quantised and pages_each > 1 else 1,
        "STATE": words,
        "STAGE": -1,
        "INTERPRET": False,
    }
    options = {"num_warps": 4, "num_stages": 4 if quantised else 2, "maxnreg": 128, "launch_cooperative_grid": True}
    text = render(
        "lightning_indexer_hopper",
        {
            "route": f"one launch, {splits} programs a row",
            "codes": (rows, total),
            "candidates": (rows, 2 * MOST_CANDIDATES),
            "counts": (rows, 2 * splits),
            "picked": (batch, tokens, top),
            "state": rows * words,
            "grid": (rows * splits,),
            "index_and_select": constants,
            "options": options,
        },
    )
    operands: dict[str, TensorSpec | str | None] = {
        "q": q,
        "keys": keys,
        "weights": weights,
        "lengths": lengths,
        "block_table": table,
        "codes": "int32",
        "candidates": "int32",
        "counts": "int32",
        "state": "int32",
        "picked": "int32",
    }
    launch = ahead_of_time("index_and_select", operands, constants, options)
    tile = f"tensordesc<{'fp8e4nv' if quantised else 'bf16'}[{PAGE}, {WIDTH}]>"
    signature = {"tiles": tile, **launch.signature}
    whole = KernelLaunch(launch.function, signature, launch.constants, launch.divisible, options)
    return KernelModule(text, (whole,), route=f"one launch, {splits} programs a row")
