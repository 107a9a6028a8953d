"""The Lightning Indexer over many query rows on Hopper: where it serves, where it wins, its tiles and buffers."""

from typing import Any

import torch

from kimigraph.codegen.kernel import KernelLaunch, KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, is_hopper, needed, padded, render

PAGE = 64
WIDTH = 128
GROUP = 512  # keys whose codes are staged before they are looked at
CHUNK = 1024  # codes a step of the selection
LEAST_ROWS = 64  # fewer leave multiprocessors idle
MULTIPROCESSORS = 132  # of an H200, where no device is here


def serves(request: KernelRequest) -> bool:
    """Whether the kernel can compute the request, on whatever target: sizes, types, strides."""
    q, keys, weights = needed(request, "q"), needed(request, "keys"), needed(request, "weights")
    table = request.tensors.get("block_table")
    heads, width = q.shape[-2:]
    total = keys.shape[1] if table is None else table.shape[1] * keys.shape[1]
    quantised = keys.dtype == "uint8"
    whole_rows = table is None and (not quantised or total % 32 == 0)
    return (
        request.tensors.get("mask") is None
        and (q.dtype, keys.dtype) in {("bfloat16", "bfloat16"), ("float8_e4m3fn", "uint8")}
        and (whole_rows or (table is not None and keys.shape[1] == PAGE))
        and width == WIDTH
        and heads in (16, 32, 64, 128)
        and tuple(keys.stride) == (keys.shape[1] * keys.shape[2], keys.shape[2], 1)
        and q.stride[-1] == 1
        and 0 not in q.shape
        and 0 < total
        and keys.shape[0] * keys.shape[1] < 1 << 30
        and 0 < int(request.attributes["k"]) <= 8192
        and weights.dtype in ("float32", "bfloat16", "float16")
    )


def wins(request: KernelRequest) -> bool:
    """Whether it is the faster one: on Hopper, where there are rows enough."""
    q = needed(request, "q")
    return is_hopper(request.target) and q.shape[0] * q.shape[1] >= LEAST_ROWS and q.shape[1] >= 128 // q.shape[2]


def build(request: KernelRequest, **chosen: int) -> KernelModule:
    """Needs ``serves(request)``; ``chosen`` overrides constants, and ``each`` the programs a multiprocessor."""
    q, keys, weights = needed(request, "q"), needed(request, "keys"), needed(request, "weights")
    lengths, table = request.tensors.get("lengths"), request.tensors.get("block_table")
    batch, tokens, heads = q.shape[:3]
    quantised = keys.dtype == "uint8"
    total = keys.shape[1] if table is None else table.shape[1] * PAGE
    top = int(request.attributes["k"])
    tiles = chosen.get("TILES", 1 if quantised else 2)
    rows = tiles * (128 // heads)
    group = chosen.get("GROUP", 2 * GROUP if quantised else GROUP)
    capacity = padded(max(2 * top, top + group))
    blocks = batch * ceil_div(tokens, rows)
    programs = min(multiprocessors(request.target) * chosen.get("each", 3 if quantised else 2), blocks)
    constants: dict[str, Any] = {
        "B": batch,
        "S": tokens,
        "T": total,
        "H": heads,
        "K": top,
        "SCALE": float(request.attributes["scale"]),
        "Q_STRIDE": q.stride,
        "WEIGHT_STRIDE": weights.stride,
        "LENGTH_STRIDE": 0 if lengths is None or lengths.shape in ((), (1,)) else lengths.stride[0],
        "TABLE_STRIDE": (0, 0) if table is None else table.stride,
        # Rows of 128 elements of a page or a sequence; quantised ones hold their scales behind their keys.
        "UNIT": keys.shape[1] * 33 // 32 if quantised else keys.shape[1],
        "WHOLE": table is None,
        "QUANTISED": quantised,
        "TILES": tiles,
        "GROUP": group,
        "CAPACITY": capacity,
        "CHUNK": min(chosen.get("CHUNK", CHUNK), capacity),
        "BLOCKS": blocks,
        "PROGRAMS": programs,
        "LIST_ROWS": bool(request.attributes.get("rows", False)),
        "MOST_PAGES": padded(ceil_div(top, PAGE)),
        "INTERPRET": False,
    }
    route = f"many rows in one launch, {rows} a program, buffers of {capacity} candidates"
    options = {"num_warps": 4, "num_stages": chosen.get("num_stages", 4 if quantised else 2)}
    if quantised:
        options["maxnreg"] = chosen.get("maxnreg", 168)
    text = render(
        "lightning_indexer_prefill",
        {
            "route": route,
            "stage": programs * rows * group,
            "found": programs * rows * capacity,
            "picked": (batch, tokens, top),
            "grid": (programs,),
            "index_rows": constants,
            "options": options,
        },
    )
    operands: dict[str, TensorSpec | str | None] = {
        "q": q,
        "keys": keys,
        "weights": weights,
        "lengths": lengths,
        "block_table": table,
        "stage": "float32",
        "found": "int32",
        "places": "int32",
        "picked": "int32",
    }
    launch = ahead_of_time("index_rows", operands, constants, options)
    tile = f"tensordesc<{'fp8e4nv' if quantised else 'bf16'}[{PAGE}, {WIDTH}]>"
    signature = {"tiles": tile, **launch.signature}
    launches = (KernelLaunch(launch.function, signature, launch.constants, launch.divisible, options),)
    return KernelModule(text, launches, route=route)


def multiprocessors(target: str) -> int:
    """Of the device here, or of an H200."""
    if target == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return MULTIPROCESSORS
