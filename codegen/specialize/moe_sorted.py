"""The form of routed experts for long prompts on Hopper: rows laid by expert, tiles by descriptors."""

from dataclasses import dataclass, replace
from typing import Any

from kimigraph.codegen.kernel import KernelLaunch, KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.moe_sizes import (
    SHARED_BLOCK,
    Experts,
    Tile,
    activation,
    choice,
    finish_constants,
    finish_grid,
    finish_launches,
    finish_tile,
    last_stride,
    open_strides,
    scratch_sizes,
    shape_constants,
    shared_programs,
    side_by_side,
    take,
)
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, is_hopper, needed, padded, render

LEAST_EACH = 128  # picks an expert: 1.3 times as fast as lists of picks at 256, not measured at 64
GROUP = 4  # tiles of rows that share columns of weights at a time


@dataclass(frozen=True)
class Cut:
    """The tiles of both products, both of the same number of rows, and columns that the other launches take at once."""

    open: Tile
    close: Tile
    lay: int = 256
    add: int = 512


CUT = Cut(Tile(128, 64, 8, 4, lines=128), Tile(128, 64, 4, 3, lines=128))
"""What measured best on an H200 at the widths of Kimi K3.1."""


def serves(request: KernelRequest, experts: Experts) -> bool:
    """Many picks an expert, in bf16, of weights whose rows lie side by side at multiples of 16 bytes."""
    weights = needed(request, "gate_up"), needed(request, "down")
    return (
        is_hopper(request.target)
        and experts.dtype == "bfloat16"
        and not experts.packed
        and experts.pairs >= LEAST_EACH * experts.count
        and experts.width % 8 == 0
        and experts.inner % 8 == 0
        and all(side_by_side(spec) for spec in weights)
    )


def build(request: KernelRequest, experts: Experts, cut: Cut = CUT) -> KernelModule:
    """Five launches, six with what follows the experts."""
    constants = _constants(request, experts, cut)
    finish = finish_tile(experts)
    single, narrow = Tile(0, 0, 4, 1), Tile(0, 0, 1, 1)
    rows = constants["open_rows"]["ROW_TILES"]
    grids = {
        "route": (experts.tokens + shared_programs(experts),),
        "lay": (experts.tokens + 1,),
        "open": (rows * ceil_div(experts.inner, cut.open.columns),),
        "close": (rows * ceil_div(experts.width, cut.close.columns),),
        "add": (experts.tokens, ceil_div(experts.width, cut.add)),
        "finish": finish_grid(experts, finish),
    }
    sizes = scratch_sizes(experts, 1) | {
        "counts": (experts.count,),
        "tiles": (rows, 4),
        "shares": (experts.pairs,),
        "outer": (experts.pairs, experts.width),
    }
    options = {
        "route": narrow.options,
        "lay": single.options,
        "open": cut.open.options,
        "close": cut.close.options,
        "add": single.options,
        "finish": finish.options,
    }
    lines = cut.open.lines
    tile = {
        "rows": [lines, cut.open.step],
        "half_rows": [lines // 2, cut.open.step],
        "gate_up": [2, cut.open.columns, cut.open.step],
        "inner": [lines, cut.close.step],
        "half_inner": [lines // 2, cut.close.step],
        "down": [cut.close.columns, cut.close.step],
    }
    whole = {"sizes": sizes, "grids": grids, "options": options, "tile": tile, **constants}
    launches = [*_launches(request, experts, constants, options, tile)]
    launches += finish_launches(request, experts, constants, finish)
    return KernelModule(render("moe_sorted", whole), tuple(launches), route="rows laid by expert")


def _constants(request: KernelRequest, experts: Experts, cut: Cut) -> dict[str, Any]:
    opened, closed = cut.open, cut.close
    shape, chosen, act = shape_constants(experts), choice(request, experts), activation(request)
    strides = open_strides(request)
    listing = {
        "EXPERTS": experts.count,
        "EXPERT_BLOCK": padded(experts.count),
        "ROW_TILES": experts.most_row_tiles(opened.lines),
        "LINES": opened.lines,
    }
    product = {
        "WIDTH": experts.width,
        "INNER": experts.inner,
        "ROW_TILES": listing["ROW_TILES"],
        "LINES": opened.lines,
        "GROUP": GROUP,
    }
    return {
        "route_tokens": {
            "LOGIT_STRIDE": needed(request, "logits").stride,
            "BIAS_STRIDE": last_stride(request, "bias"),
            "SHARED_STRIDE": strides["SHARED_STRIDE"],
            "TOKENS": experts.tokens,
            "SHARED": shape["SHARED"],
            **chosen,
            "PICK_BLOCK": padded(experts.picks),
            **act,
            "BLOCK": SHARED_BLOCK,
        },
        "lay_rows": {
            "X_STRIDE": strides["X_STRIDE"],
            "TOKENS": experts.tokens,
            "WIDTH": experts.width,
            "PICKS": experts.picks,
            "PICK_BLOCK": padded(experts.picks),
            **listing,
            "BLOCK": cut.lay,
        },
        "open_rows": {**product, **act, "TILE": opened.columns, "STEP": opened.step},
        "close_rows": {**product, "TILE": closed.columns, "STEP": closed.step},
        "add_picks": {"WIDTH": experts.width, "PICKS": experts.picks, "BLOCK": cut.add},
        **finish_constants(request, experts, finish_tile(experts), 1),
    }


def _launches(
    request: KernelRequest,
    experts: Experts,
    constants: dict[str, Any],
    options: dict[str, dict[str, Any]],
    tile: dict[str, list[int]],
) -> list[KernelLaunch]:
    operands: dict[str, TensorSpec | str | None] = dict(request.tensors)
    picks = {"chosen": "int32", "weight": "float32", "counts": "int32", "slots": "int32"}
    shared = {**take(operands, "shared_gate", "shared_up"), "shared": experts.dtype if experts.shared else None}
    laid = {"rows": experts.dtype, "shares": "float32", "places": "int32", "tiles": "int32"}
    routed = "float32" if experts.finishes else experts.dtype
    given: dict[str, tuple[str, dict[str, TensorSpec | str | None]]] = {
        "route_tokens": ("route", {**take(operands, "logits", "bias"), **picks, **shared}),
        "lay_rows": ("lay", {**take(operands, "x"), **picks, **laid}),
        "open_rows": ("open", {"shares": "float32", "tiles": "int32", "inner": experts.dtype}),
        "close_rows": ("close", {"tiles": "int32", "outer": experts.dtype}),
        "add_picks": ("add", {"outer": experts.dtype, "places": "int32", "routed": routed}),
    }
    described = {"open_rows": ("rows", "half_rows", "gate_up"), "close_rows": ("inner", "half_inner", "down")}
    made: list[KernelLaunch] = []
    for function, (option, arguments) in given.items():
        takes = {} if function == "lay_rows" else {"INTERPRET": False}
        launch = ahead_of_time(function, arguments, {**constants[function], **takes}, options[option])
        tiles = {name: f"tensordesc<bf16{tile[name]}>" for name in described.get(function, ())}
        made.append(replace(launch, signature=tiles | launch.signature))
    return made
