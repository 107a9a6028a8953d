"""Which kernels serve a call of routed experts, and the tiles of those for any device and size.

On Hopper one token streams its experts' weights through one launch, and long prompts lay their rows by
expert. MXFP4 weights have a form for a few tokens; for more, or without what follows, picks are listed by expert.
"""

from dataclasses import replace
from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize import moe_packed, moe_sorted, moe_stream
from kimigraph.codegen.specialize.moe_sizes import (
    SHARED_BLOCK,
    Experts,
    Tile,
    Tiling,
    activation,
    choice,
    finish_constants,
    finish_grid,
    finish_launches,
    finish_tile,
    last_stride,
    launch_record,
    open_strides,
    scratch_sizes,
    shape_constants,
    shared_programs,
    take,
)
from kimigraph.codegen.specialize.rendering import ceil_div, needed, padded, render

FEW_TOKENS = 16  # up to here every pick streams its own weights
COMBINE_BLOCK = 1024


def build(request: KernelRequest, tiling: Tiling | None = None) -> KernelModule:
    """Two or three launches for a few tokens; more with routing and sums of their own; CompileError for odd types."""
    experts = Experts.of(request)
    for form in (moe_packed, moe_stream, moe_sorted) if tiling is None else ():
        if form.serves(request, experts):
            return form.build(request, experts)
    chosen = tiling or tiling_for(experts)
    few = experts.tokens <= FEW_TOKENS and not experts.packed
    return _few(request, experts, chosen) if few else _many(request, experts, chosen)


def tiling_for(experts: Experts) -> Tiling:
    """What measured best on an H200 at the widths of Kimi K3.1."""
    if experts.tokens > FEW_TOKENS or experts.packed:
        return _grouped_tiling(ceil_div(experts.pairs, experts.count), experts)
    if experts.dtype == "float32":
        return Tiling(Tile(16, 128, 4), Tile(4, 512, 4), finish_tile(experts))
    if experts.tokens == 1:
        closed = Tile(2, 1024, 4, parts=2) if experts.finishes else Tile(2, 512, 4)
        return Tiling(Tile(64, 128, 4, 4, dot=True), closed, finish_tile(experts))
    return Tiling(Tile(64, 64, 4, 4, dot=True), Tile(4, 512, 4), finish_tile(experts))


def _grouped_tiling(each: int, experts: Experts) -> Tiling:
    """For ``each`` picks an expert: tiles of lines about twice as long, so that most experts have one."""
    lines = min(max(padded(2 * each), 16), 64)
    if experts.dtype == "float32":
        tile = Tile(64, 32, 4, 3, min(lines, 32))
        return Tiling(tile, tile, finish_tile(experts))
    opened = Tile(64, 64, 4, 3 if each >= 64 else 4, lines)
    if each >= 64:
        return Tiling(opened, Tile(128, 64, 8, 3, 128), finish_tile(experts))
    closed = Tile(64, 64, 4, 5, lines) if lines == 16 else Tile(128, 64, 4, 4, lines)
    return Tiling(opened, closed, finish_tile(experts))


def _few(request: KernelRequest, experts: Experts, tiling: Tiling) -> KernelModule:
    tiling = _fitted(experts, tiling)
    opened, closed, finish = tiling.open, tiling.close, tiling.finish
    shape, act = shape_constants(experts), activation(request)
    programs = experts.pairs * ceil_div(experts.inner, opened.columns) + shared_programs(experts)
    constants: dict[str, Any] = {
        "open_experts": {
            **open_strides(request),
            "LOGIT_STRIDE": needed(request, "logits").stride,
            "BIAS_STRIDE": last_stride(request, "bias"),
            **{name: shape[name] for name in ("TOKENS", "WIDTH", "INNER", "SHARED")},
            **choice(request, experts),
            **act,
            "TILE": opened.columns,
            "STEP": opened.step,
            "DOT": opened.dot,
            "BLOCK": SHARED_BLOCK,
        },
        "close_experts": {
            "DOWN_STRIDE": needed(request, "down").stride,
            **{name: shape[name] for name in ("TOKENS", "WIDTH", "INNER")},
            "PICKS": experts.picks,
            "PARTS": closed.parts,
            "TILE": closed.columns,
            "STEP": closed.step,
            "DOT": closed.dot,
        },
        **finish_constants(request, experts, finish, closed.parts),
    }
    grids = {
        "open": (programs,),
        "close": (experts.tokens * closed.parts * ceil_div(experts.width, closed.columns),),
        "finish": finish_grid(experts, finish),
    }
    sizes = scratch_sizes(experts, closed.parts)
    options = {"open": opened.options, "close": closed.options, "finish": finish.options}
    whole = {"sizes": sizes, "grids": grids, "options": options, **constants}
    operands: dict[str, TensorSpec | str | None] = dict(request.tensors)
    scratch = {"inner": experts.dtype, "chosen": "int32", "shared": experts.dtype if experts.shared else None}
    routed = "float32" if experts.finishes else experts.dtype
    launches = [
        launch_record(
            "open_experts",
            {**take(operands, "x", "logits", "bias", "gate_up", "shared_gate", "shared_up"), **scratch},
            constants,
            opened,
        ),
        launch_record(
            "close_experts",
            {"inner": experts.dtype, "chosen": "int32", **take(operands, "down"), "routed": routed},
            constants,
            closed,
        ),
        *finish_launches(request, experts, constants, finish),
    ]
    return KernelModule(render("moe_experts", whole), tuple(launches), route="a pick at a time")


def _many(request: KernelRequest, experts: Experts, tiling: Tiling) -> KernelModule:
    opened, closed, finish = tiling.open, tiling.close, tiling.finish
    shape = shape_constants(experts)
    row_tiles = experts.most_row_tiles(opened.lines)
    listing = {"EXPERTS": experts.count, "EXPERT_BLOCK": padded(experts.count)}
    constants: dict[str, Any] = {
        "route_tokens": {
            "LOGIT_STRIDE": needed(request, "logits").stride,
            "BIAS_STRIDE": last_stride(request, "bias"),
            "TOKENS": experts.tokens,
            **choice(request, experts),
            "PICK_BLOCK": padded(experts.picks),
        },
        "open_groups": {
            **open_strides(request),
            **{name: shape[name] for name in ("TOKENS", "WIDTH", "INNER", "SHARED")},
            **listing,
            "PICKS": experts.picks,
            "ROW_TILES": row_tiles,
            **activation(request),
            "LINES": opened.lines,
            "TILE": opened.columns,
            "STEP": opened.step,
            "BLOCK": SHARED_BLOCK,
        },
        "close_groups": {
            "DOWN_STRIDE": needed(request, "down").stride,
            **{name: shape[name] for name in ("TOKENS", "WIDTH", "INNER")},
            **listing,
            "LINES": closed.lines,
            "TILE": closed.columns,
            "STEP": closed.step,
        },
        "combine": {
            "TOKENS": experts.tokens,
            "WIDTH": experts.width,
            "PICKS": experts.picks,
            "BLOCK": COMBINE_BLOCK,
        },
        **finish_constants(request, experts, finish, 1),
    }
    single = Tile(0, 0, 4, 1)
    grids = {
        "route": (experts.tokens,),
        "open": (row_tiles * ceil_div(experts.inner, opened.columns) + shared_programs(experts),),
        "close": (experts.most_row_tiles(closed.lines) * ceil_div(experts.width, closed.columns),),
        "combine": (ceil_div(experts.tokens * experts.width, COMBINE_BLOCK),),
        "finish": finish_grid(experts, finish),
    }
    sizes = scratch_sizes(experts, 1) | {
        "members": (experts.count, experts.tokens),
        "counts": (experts.count,),
        "outer": (experts.pairs, experts.width),
    }
    options = {
        "route": single.options,
        "open": opened.options,
        "close": closed.options,
        "combine": single.options,
        "finish": finish.options,
    }
    whole = {"sizes": sizes, "grids": grids, "options": options, **constants}
    operands: dict[str, TensorSpec | str | None] = dict(request.tensors)
    lists = {"counts": "int32", "members": "int32"}
    routed = "float32" if experts.finishes else experts.dtype
    words = {"words": "int32" if experts.packed else None}
    opens = {
        **take(operands, "x", "gate_up"),
        **words,
        "weight": "float32",
        **lists,
        **take(operands, "shared_gate", "shared_up"),
        "inner": experts.dtype,
        "shared": experts.dtype if experts.shared else None,
    }
    routes = {**take(operands, "logits", "bias"), "chosen": "int32", "weight": "float32", **lists}
    closes = {"inner": experts.dtype, **take(operands, "down"), **words, **lists, "outer": experts.dtype}
    launches = [
        launch_record("route_tokens", routes, constants, single),
        launch_record("open_groups", opens, constants, opened),
        launch_record("close_groups", closes, constants, closed),
        launch_record("combine", {"outer": experts.dtype, "routed": routed}, constants, single),
        *finish_launches(request, experts, constants, finish),
    ]
    return KernelModule(render("moe_groups", whole), tuple(launches), route="picks listed by expert")


def _fitted(experts: Experts, tiling: Tiling) -> Tiling:
    """Parts that divide the picks, and one where nothing adds them up afterwards; lanes only in fp32."""
    closed = tiling.close
    parts = closed.parts if experts.finishes and experts.picks % closed.parts == 0 else 1
    narrow = experts.dtype != "float32"
    return Tiling(
        replace(tiling.open, dot=tiling.open.dot and narrow),
        replace(closed, parts=parts, dot=closed.dot and narrow),
        tiling.finish,
    )
