"""The Lightning Indexer over many MXFP8 query rows on Hopper, in slabs: where it serves and wins, its tiles."""

from dataclasses import replace
from typing import Any

from kimigraph.codegen.kernel import KernelLaunch, KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.lightning_indexer_groups import PAGE, fit_groups
from kimigraph.codegen.specialize.lightning_indexer_prompt import (
    LEAST_ROWS,
    NARROW,
    WARPS,
    WIDE,
    Groups,
    slab_rows,
    slab_selection,
    splits_of,
)
from kimigraph.codegen.specialize.lightning_indexer_split import selection, shared_tile
from kimigraph.codegen.specialize.rendering import ahead_of_time, is_hopper, needed, render

REAL_OPTIONS = {"num_warps": 4}
STAGES = 6  # of 64 keys in bf16 beside three times 128 queries; beside twice 256 one less


def serves(request: KernelRequest) -> bool:
    """Whether the kernels can compute the request, on Hopper: formats, sizes, strides."""
    return fit_groups(request)


def wins(request: KernelRequest) -> bool:
    """Whether it is the faster one: on Hopper, where a sequence has rows enough."""
    return is_hopper(request.target) and needed(request, "q").shape[1] >= LEAST_ROWS


def build(request: KernelRequest, *, slab: int | None = None, groups: Groups | None = None) -> KernelModule:
    """Needs ``serves(request)``. ``slab`` overrides how many rows share the memory, ``groups`` what multiplies."""
    q, keys, weights = needed(request, "q"), needed(request, "keys"), needed(request, "weights")
    scales, lengths, table = (request.tensors.get(name) for name in ("q_scales", "lengths", "block_table"))
    batch, tokens, heads = q.shape[:3]
    total = keys.shape[1] if table is None else table.shape[1] * PAGE
    groups = groups or (WIDE if heads == 64 else NARROW)
    block = groups.rows(heads)
    slab = min(slab or slab_rows(total, tokens), tokens)
    splits = splits_of(slab, block, total)
    by_rows = bool(request.attributes.get("rows", False))
    score: dict[str, Any] = {
        "T": total,
        "H": heads,
        "SCALE": float(request.attributes["scale"]),
        "Q_STRIDE": (heads * 128, 128, 1),
        "WEIGHT_STRIDE": weights.stride[1:],
        "TABLE_STRIDE": 1,
        "QUANTISED": False,
        "SPLITS": splits,
        "STAGES": STAGES if groups.queries == 128 else STAGES - 1,
        "REGISTERS": groups.own,
        "BY_QUARTERS": heads == 64,
        "QUERIES": groups.queries,
    }
    select = slab_selection(request, total, slab, splits)
    convert: dict[str, dict[str, Any]] = {
        "real_keys": {
            "TABLE_STRIDE": 0 if table is None else table.stride[1],
            "PLANE": keys.shape[1],
            "PAGED": table is not None,
        },
        "real_queries": {
            "H": heads,
            "Q_STRIDE": q.stride[1:],
            "Q_SCALE_STRIDE": (0, 0, 0) if scales is None else scales.stride[1:],
        },
    }
    score_options: dict[str, Any] = {"num_warps": 4, "maxnreg": groups.registers}
    select_options: dict[str, Any] = {"num_warps": WARPS, "maxnreg": 128}
    route = f"MXFP8, many rows, four launches a slab of {slab} rows"
    constants = {
        "route": route,
        "block": block,
        "codes": (slab, total),
        "peaks": (slab, splits),
        "kept": (slab, total if select["TILES"] > 1 else 0),
        "picked": (batch, tokens, select["K"]),
        "entries": (total // PAGE,),
        "cache": (total, 128),
        "queries": (slab, heads, 128),
        "rows": by_rows,
        **convert,
        "real_options": REAL_OPTIONS,
        "score_prompt": score,
        "score_options": score_options,
        "select_codes": select,
        "select_options": select_options,
    }
    first = None if lengths is None else "int32"
    operands: dict[str, TensorSpec | str | None] = {
        "q": "bfloat16",
        "weights": weights,
        "lengths": first,
        "block_table": "int32",
        "codes": "int32",
        "peaks": "int32",
    }
    scoring = ahead_of_time("score_prompt", operands, {"scale_rows": None, **score}, score_options)
    signature = {
        "tiles": shared_tile("bf16", [PAGE, 128], 128, 16),
        **scoring.signature,
        "sequence": "i32",
        "rows": "i32",
    }
    scoring = KernelLaunch(
        scoring.function, signature, scoring.constants, ("q", "codes", "peaks", "block_table"), score_options
    )
    selecting = selection(first, table if by_rows else None, select, select_options)
    # Slabs begin at addresses of their own.
    selecting = replace(selecting, divisible=("codes", "peaks", "kept"))
    text = render("lightning_indexer_group_prompt", constants)
    return KernelModule(text, (*_conversions(request, convert), scoring, selecting), route=route)


def _conversions(request: KernelRequest, constants: dict[str, dict[str, Any]]) -> tuple[KernelLaunch, KernelLaunch]:
    """The launches that make bf16 of keys and of queries."""
    keys, table = needed(request, "keys"), request.tensors.get("block_table")
    options = REAL_OPTIONS
    of_keys: dict[str, TensorSpec | str | None] = {
        "keys": keys,
        "block_table": table,
        "real": "bfloat16",
        "tiles": "int32",
    }
    first = ahead_of_time("real_keys", of_keys, constants["real_keys"], options)
    first = replace(first, signature={**first.signature, "sequence": "i32"}, divisible=("keys", "real", "tiles"))
    of_queries: dict[str, TensorSpec | str | None] = {
        "q": needed(request, "q"),
        "q_scales": request.tensors.get("q_scales"),
        "real": "bfloat16",
    }
    second = ahead_of_time("real_queries", of_queries, constants["real_queries"], options)
    return first, replace(second, divisible=("real",))
