"""The exchange of candidates between ranks in one launch: sizes, and room for what is said."""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rank_exchange import NO_INTEGER, serves
from kimigraph.codegen.specialize.rendering import ahead_of_time, needed, padded, refuse, render

BINS = 256
MOST, TOGETHER = 1 << 14, 512
"""Candidates of all ranks that a program can hold; rows that share the room, which each rank has for all others."""
COMPARED = 128
"""Contested candidates of all ranks that are compared with one another, all at once."""


def build(request: KernelRequest) -> KernelModule:
    """``exchange_picks``; CompileError for more candidates a rank than k, or more of all ranks than can be held."""
    scores, places = needed(request, "scores"), needed(request, "places")
    batch, tokens, each = scores.shape
    picks, ways = int(request.attributes["k"]), int(request.attributes["ways"])
    held = padded(ways) * padded(each)
    if ways < 2 or each > picks or held > MOST or not (serves(scores) and serves(places)):
        reason = f"{each} candidates of each of {ways} ranks for {picks} winners"
        raise refuse(request, reason, f"at most k a rank, contiguous, and {MOST} in all are held: use fewer ranks")
    rows, room = batch * tokens, (each + 1) // 2 * 2
    together = min(rows, TOGETHER)
    far = 4 + BINS + 2 * room
    constants: dict[str, Any] = {
        "N": each,
        "K": picks,
        "RUN": int(request.attributes["run"]),
        "ROWS": together,
        "FAR": far,
        "WORDS": together * far,
        "WAYS": ways,
        "NONE": NO_INTEGER,
        "BINS": BINS,
        "FEW": min(max(COMPARED // padded(ways), 2), padded(each)),
        "BLOCK_N": padded(each),
        "BLOCK_K": padded(picks),
        "BLOCK_W": padded(ways),
    }
    options = {"num_warps": warps_for(each)}
    whole: dict[str, Any] = {
        "group": request.attributes["group"],
        "rows": rows,
        "out": (batch, tokens, picks),
        "told": (together, far),
        "exchange_rows": constants,
        "options": options,
    }
    operands: dict[str, TensorSpec | str | None] = {"scores": scores, "places": places}
    operands |= {"out": "int32", "told": "int32", "peers": "int64", "rounds": "int32"}
    launch = ahead_of_time("exchange_rows", operands, constants, options)
    return KernelModule(render("exchange_picks", whole), (launch,), route=f"one launch, {BINS} bins")


def warps_for(each: int) -> int:
    """Warps of a program whose rank has so many candidates: some a thread, since all wait for one another often."""
    return min(max(padded(each) // 256, 4), 8)
