"""The form of routed experts for one token on Hopper: one launch that streams their weights, one for what follows."""

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
    is_hopper,
    needed,
    padded,
    programs_at_once,
    render,
)

STAGES = 5  # slots of the ring, 16 KiB each: programs of the next launch find room beside these
WARPS = 8
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
        and not experts.packed
        and experts.dtype == "bfloat16"
        and request.attributes["groups"] == request.attributes["group_picks"]
        and experts.count <= MOST_EXPERTS
        and side_by_side(gate_up)
        and side_by_side(down)
        and experts.width % 64 == 0
        and experts.width % programs == 0
        and experts.inner % 1024 == 0
        and experts.pairs * experts.inner % (64 * programs) == 0
        and programs % experts.picks == 0  # all tiles of a program are one pick's
        and experts.pairs * experts.inner == SLOT  # longer rows take several slots: right, but never timed
    )


def build(request: KernelRequest, experts: Experts) -> KernelModule:
    """For a request that ``serves`` accepts, or one that only its longer rows keep from that."""
    programs = programs_at_once(request.target, 1)
    constants: dict[str, Any] = {
        "X_STRIDE": needed(request, "x").stride,
        "LOGIT_STRIDE": needed(request, "logits").stride,
        "BIAS_STRIDE": last_stride(request, "bias"),
        "WIDTH": experts.width,
        "INNER": experts.inner,
        "EXPERTS": experts.count,
        "PICKS": experts.picks,
        "RENORMALIZE": bool(request.attributes["renormalize"]),
        "SCALE": float(request.attributes["scale"]),
        "EACH": max(padded(experts.count) // 32, 1),
        **activation(request),
        "PROGRAMS": programs,
        "SHARED_STRIDE": open_strides(request)["SHARED_STRIDE"],
        "SHARED": max(experts.shared, 1),
        "STAGES": STAGES,
        "DEPTHS": padded(experts.width // 64),
        "ROWS": padded(experts.width // programs),
        "REGISTERS": REGISTERS,
    }
    options = {
        "num_warps": WARPS, "maxnreg": MOST_REGISTERS, "launch_cooperative_grid": True, "launch_pdl": True
    }  # fmt: skip
    finish = finish_tile(experts)
    finishing = finish_constants(request, experts, finish, 1)
    whole = {
        "sizes": scratch_sizes(experts, 1),
        "grid": finish_grid(experts, finish),
        "options": {"stream": options, "finish": finish.options},
        "stream_experts": constants,
        **finishing,
    }
    operands: dict[str, TensorSpec | str | None] = {
        **take(dict(request.tensors), "x", "logits", "bias", "shared_gate", "shared_up"),
        "shared": experts.dtype if experts.shared else None,
        "inner": experts.dtype,
        "chosen": "int32",
        "routed": "float32" if experts.finishes else experts.dtype,
        "arrivals": "int32",
    }
    tiles = {"gate_up": shared_tile("bf16", [64, 64], 128, 16), "down": shared_tile("bf16", [16, 64], 128, 16)}
    stream = ahead_of_time("stream_experts", operands, constants, options)
    launches = (
        replace(stream, signature=tiles | stream.signature),
        *finish_launches(request, experts, finishing, finish),
    )
    return KernelModule(render("moe_stream_gluon", whole), launches, route="all weights of one token in one stream")
