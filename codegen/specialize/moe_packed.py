"""The form of routed experts over MXFP4 weights for a few tokens: where it serves, its tiles."""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
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

MOST_TOKENS = 2  # more have matrix units do the products


def serves(request: KernelRequest, experts: Experts) -> bool:
    """A few tokens with what follows the experts, which adds parts up; otherwise picks are listed by expert."""
    return experts.packed and experts.finishes and experts.tokens <= MOST_TOKENS


def tiling_for(experts: Experts) -> Tiling:
    """Columns a program and depth of a step; every pick is a part, which the last launch adds up."""
    return Tiling(Tile(64, 128, 4, 4), Tile(64, 256, 4, 3, parts=experts.picks), finish_tile(experts))


def build(request: KernelRequest, experts: Experts, tiling: Tiling | None = None) -> KernelModule:
    """Three launches, for a request that ``serves`` accepts; the parts of a ``tiling`` must divide the picks."""
    tiling = tiling or tiling_for(experts)
    opened, closed, finish = tiling.open, tiling.close, tiling.finish
    shape = shape_constants(experts)
    programs = experts.pairs * ceil_div(experts.inner, opened.columns) + shared_programs(experts)
    strides = open_strides(request)
    constants: dict[str, Any] = {
        "open_packed": {
            **{name: strides[name] for name in ("X_STRIDE", "SHARED_STRIDE")},
            "LOGIT_STRIDE": needed(request, "logits").stride,
            "BIAS_STRIDE": last_stride(request, "bias"),
            **{name: shape[name] for name in ("TOKENS", "WIDTH", "INNER", "SHARED")},
            **choice(request, experts),
            **activation(request),
            "TILE": opened.columns,
            "STEP": min(opened.step, padded(experts.width)),
            "BLOCK": SHARED_BLOCK,
        },
        "close_packed": {
            **{name: shape[name] for name in ("TOKENS", "WIDTH", "INNER")},
            "PICKS": experts.picks,
            "PARTS": closed.parts,
            "TILE": closed.columns,
            "STEP": min(closed.step, padded(experts.inner)),
        },
        **finish_constants(request, experts, finish, closed.parts),
    }
    grids = {
        "open": (programs,),
        "close": (experts.tokens * closed.parts * ceil_div(experts.width, closed.columns),),
        "finish": finish_grid(experts, finish),
    }
    options = {"open": opened.options, "close": closed.options, "finish": finish.options}
    whole = {"sizes": scratch_sizes(experts, closed.parts), "grids": grids, "options": options, **constants}
    operands: dict[str, TensorSpec | str | None] = dict(request.tensors)
    shared = experts.dtype if experts.shared else None
    opens = {
        **take(operands, "x", "logits", "bias"),
        "words": "int32",
        "planes": operands["gate_up"],
        **take(operands, "shared_gate", "shared_up"),
        **{"inner": experts.dtype, "chosen": "int32", "shared": shared},
    }
    closes = {"inner": experts.dtype, "chosen": "int32", "words": "int32", "planes": operands["down"]}
    launches = [
        launch_record("open_packed", opens, constants, opened),
        launch_record("close_packed", {**closes, "routed": "float32"}, constants, closed),
        *finish_launches(request, experts, constants, finish),
    ]
    return KernelModule(render("moe_packed", whole), tuple(launches), route="a pick at a time, MXFP4")
