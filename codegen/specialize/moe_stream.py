"""The form of routed experts for one token on Hopper: one launch that streams all weights, one for what follows."""

from dataclasses import replace
from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.lightning_indexer_split import shared_tile
from kimigraph.codegen.specialize.moe_sizes import (
    Experts,
    activation,
    finish_constants,
    finish_grid,
    finish_launches,
    finish_tile,
    last_stride,
    open_strides,
    scratch_sizes,
    side_by_side,
    take,
)
from kimigraph.codegen.specialize.rendering import (
    ahead_of_time,
    ceil_div,
    is_hopper,
    needed,
    padded,
    programs_at_once,
    render,
)

STAGES = 6  # slots of the ring, 16 KiB each: programs of the next launch find room beside these
WARPS = 4
REGISTERS = 96  # a thread of the warp that brings the weights
MOST_REGISTERS = 128
SLOT = 8192  # weights of a slot
MOST_EXPERTS = 1024  # each warp holds all of them, 32 a lane


def serves(request: KernelRequest, experts: Experts) -> bool:
    """One token in bf16, weights along rows, and sizes of which every program takes the same share."""
    gate_up, down = needed(request, "gate_up"), needed(request, "down")
    programs = programs_at_once(request.target, 1)
    return (
        is_hopper(request.target)
        and experts.tokens == 1
        and experts.dtype == "bfloat16"
        and not (
            experts.finishes or experts.shared
        )  # a whole block took 33 us this way on an H200, 26 in three launches
        and request.attributes["groups"] == request.attributes["group_picks"]
        and experts.count <= MOST_EXPERTS
        and side_by_side(gate_up)
        and side_by_side(down)
        and experts.width % 64 == 0
        and experts.width % programs == 0
        and experts.inner % 1024 == 0
        and experts.pairs * experts.inner % (64 * programs) == 0
        and experts.pairs * experts.inner == SLOT  # longer rows take several slots, which no GPU has run yet
    )


def build(request: KernelRequest, experts: Experts) -> KernelModule:
    """For a request that ``serves`` accepts."""
    programs = programs_at_once(request.target, 1)
    finish = finish_tile(experts)
    constants: dict[str, Any] = {
        "stream_experts": {
            **{name: value for name, value in open_strides(request).items() if name != "GATE_STRIDE"},
            "LOGIT_STRIDE": needed(request, "logits").stride,
            "BIAS_STRIDE": last_stride(request, "bias"),
            "WIDTH": experts.width,
            "INNER": experts.inner,
            "SHARED": max(experts.shared, 1),
            "SHARE": padded(ceil_div(experts.shared, programs)),
            "EXPERTS": experts.count,
            "PICKS": experts.picks,
            "RENORMALIZE": bool(request.attributes["renormalize"]),
            "SCALE": float(request.attributes["scale"]),
            "EACH": max(padded(experts.count) // 32, 1),
            **activation(request),
            "PROGRAMS": programs,
            "STAGES": STAGES,
            "DEPTHS": padded(experts.width // 64),
            "REGISTERS": REGISTERS,
        },
        **finish_constants(request, experts, finish, 1, early=True),
    }
    early = {"launch_pdl": True}
    streamed = {"num_warps": WARPS, "maxnreg": MOST_REGISTERS, "launch_cooperative_grid": True, **early}
    whole = {
        "sizes": scratch_sizes(experts, 1),
        "grids": {"finish": finish_grid(experts, finish)},
        "options": {"stream": streamed, "finish": finish.options | early},
        **constants,
    }
    operands: dict[str, TensorSpec | str | None] = {
        **take(dict(request.tensors), "x", "logits", "bias", "shared_gate", "shared_up"),
        "inner": experts.dtype,
        "chosen": "int32",
        "shared": experts.dtype if experts.shared else None,
        "routed": "float32" if experts.finishes else experts.dtype,
        "arrivals": "int32",
    }
    tiles = {"gate_up": shared_tile("bf16", [64, 64], 128, 16), "down": shared_tile("bf16", [16, 64], 128, 16)}
    stream = ahead_of_time("stream_experts", operands, constants["stream_experts"], streamed)
    behind = [replace(one, options=one.options | early) for one in finish_launches(request, experts, constants, finish)]
    launches = (replace(stream, signature=tiles | stream.signature), *behind)
    return KernelModule(render("moe_stream_gluon", whole), launches, route="all weights of one token in one stream")
