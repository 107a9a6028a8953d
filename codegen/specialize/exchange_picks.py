"""The exchange of candidates between ranks in one launch: sizes, and room for what is said."""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rank_exchange import NO_INTEGER, serves
from kimigraph.codegen.specialize.rendering import ahead_of_time, needed, padded, refuse, render

BINS = 256
MOST, TOGETHER = 1 << 14, 512
"""Candidates of all ranks that a program can hold; rows that share the room, which each rank has for all others."""


def build(request: KernelRequest) -> KernelModule:
    """``exchange_picks``; CompileError for more candidates a rank than k, or more of all ranks than can be sorted."""
    scores, places = needed(request, "scores"), needed(request, "places")
    batch, tokens, each = scores.shape
    picks, ways = int(request.attributes["k"]), int(request.attributes["ways"])
    held = padded(ways) * padded(each)
    if ways < 2 or each > picks or held > MOST or not (serves(scores) and serves(places)):
        reason = f"{each} candidates of each of {ways} ranks for {picks} winners"
        raise refuse(request, reason, f"at most k a rank, contiguous, and {MOST} in all are held: use fewer ranks")
    rows, room = batch * tokens, (each + 3) // 4 * 4
    together = min(rows, TOGETHER)
    far = 4 + BINS + 4 + 2 * room
    constants: dict[str, Any] = {
        "N": each,
        "K": picks,
        "RUN": int(request.attributes["run"]),
        "ROWS": together,
        "FAR": far,
        "ROOM": room,
        "WORDS": together * far,
        "WAYS": ways,
        "NONE": NO_INTEGER,
        "BINS": BINS,
        "BLOCK_N": padded(each),
        "BLOCK_K": padded(picks),
        "BLOCK_W": padded(ways),
        "STEPS": each.bit_length(),
    }
    options = {"num_warps": min(max(held // 128, 4), 16)}
    whole: dict[str, Any] = {
        "group": request.attributes["group"],
        "rows": rows,
        "out": (batch, tokens, picks),
        "lists": (together, 3, ways, each),
        "exchange_rows": constants,
        "options": options,
    }
    operands: dict[str, TensorSpec | str | None] = {"scores": scores, "places": places}
    operands |= {"own_out": "int32", "all_out": "int32", "lists": "int32", "peers": "int64", "rounds": "int32"}
    launch = ahead_of_time("exchange_rows", operands, constants, options)
    return KernelModule(render("exchange_picks", whole), (launch,), route=f"one launch, {BINS} bins")
