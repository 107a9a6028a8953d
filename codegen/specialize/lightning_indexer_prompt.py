"""The Lightning Indexer over many query rows in slabs on Hopper: where it serves, its slabs and tiles."""

from dataclasses import dataclass, replace
from typing import Any

from kimigraph.codegen.kernel import KernelLaunch, KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.lightning_indexer_split import EACH, selection, with_tiles
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, is_hopper, needed, padded, render

PAGE = 64
WIDTH = 128
FEW_KEYS = 8192
LEAST_ROWS = 64  # fewer leave multiprocessors idle
SLAB_WORDS = 1 << 26  # of memory for a slab, 256 MiB
PROGRAMS = 3 * 132  # of a slab's scores: rows see more keys the later they stand, so that a few each are even
STAGES = 8
WARPS = 8  # of a row's selection
HELD = 8192  # codes of a whole row that they hold at once
SLICE = 4096  # of a longer one: more spill


def serves(request: KernelRequest) -> bool:
    """Whether the kernels can compute the request, on Hopper: quantised pages, sizes, strides."""
    q, keys, weights = needed(request, "q"), needed(request, "keys"), needed(request, "weights")
    table = request.tensors.get("block_table")
    heads, width = q.shape[-2:]
    return (
        request.tensors.get("mask") is None
        and (q.dtype, keys.dtype) == ("float8_e4m3fn", "uint8")
        and table is not None
        and keys.shape[1] == PAGE
        and width == WIDTH
        and heads in (16, 32, 64, 128)
        and tuple(keys.stride) == (keys.shape[1] * keys.shape[2], keys.shape[2], 1)
        and keys.aligned
        and q.stride[-1] == 1
        and 0 not in (*q.shape, *table.shape)
        and 0 < int(request.attributes["k"]) <= 8192
        and weights.dtype in ("float32", "bfloat16", "float16")
    )


def wins(request: KernelRequest) -> bool:
    """Whether it is the faster one: on Hopper, where a sequence has rows enough."""
    return is_hopper(request.target) and needed(request, "q").shape[1] >= LEAST_ROWS


def row_division(total: int) -> tuple[int, int]:
    """Codes of a warp a tile and tiles of a row that one program selects from."""
    columns = max(padded(ceil_div(total, WARPS)), 32 * EACH)
    columns = columns if columns * WARPS <= HELD else SLICE // WARPS
    return columns, ceil_div(total, WARPS * columns)


def sample_tiles(tiles: int) -> int:
    """Tiles that bound the last winner from below before all are packed: what passes the bound is stored, and read
    again, which costs more than a look at all of a short row."""
    return min(tiles, max(8, ceil_div(tiles, 2)))


@dataclass(frozen=True)
class Groups:
    """What multiplies a page: ``number`` groups of four warps, each with ``queries`` rows of heads. Its threads have
    ``own`` registers, all of a program ``registers`` in the mean."""

    number: int
    queries: int
    own: int
    registers: int

    def rows(self, heads: int) -> int:
        """Query rows of a program."""
        return self.number * (self.queries // heads)


NARROW, WIDE = Groups(3, 128, 160, 128), Groups(2, 256, 232, 168)


def groups_of(heads: int, total: int) -> Groups:
    """The faster ones. Blocks of more rows leave multiprocessors idle where rows see few keys."""
    return WIDE if heads == 64 and total > FEW_KEYS else NARROW


def splits_of(slab: int, block: int, total: int) -> int:
    """How many programs share the pages of a block of rows, a power of two."""
    return min(padded(ceil_div(PROGRAMS, ceil_div(slab, block))), padded(ceil_div(total, 16 * PAGE)), 32)


def slab_selection(request: KernelRequest, total: int, slab: int, splits: int) -> dict[str, Any]:
    """Constants of ``select_codes`` for a slab of rows of ``total`` codes, whose peaks ``splits`` programs left."""
    table = request.tensors.get("block_table")
    columns, row_tiles = row_division(total)
    return {
        "S": slab,
        "T": total,
        "K": int(request.attributes["k"]),
        "LENGTH_STRIDE": 0,
        "TABLE_STRIDE": (0, 0) if table is None else table.stride,
        "SPLITS": splits,
        "CTAS": 1,
        "EACH": EACH,
        "COLUMNS": columns,
        "TILES": row_tiles,
        "SAMPLE": sample_tiles(row_tiles),
    }


def slab_rows(total: int, tokens: int) -> int:
    """How many of ``tokens`` rows with ``total`` codes each share the memory."""
    _, row_tiles = row_division(total)
    return min(max(SLAB_WORDS // (total * (2 if row_tiles > 1 else 1)), LEAST_ROWS), tokens)


def build(request: KernelRequest, *, slab: int | None = None, groups: Groups | None = None) -> KernelModule:
    """Needs ``serves(request)``. ``slab`` overrides how many rows share the memory, ``groups`` what multiplies."""
    q, weights = needed(request, "q"), needed(request, "weights")
    lengths, table = request.tensors.get("lengths"), request.tensors.get("block_table")
    batch, tokens, heads = q.shape[:3]
    assert table is not None
    total = table.shape[1] * PAGE
    groups = groups or groups_of(heads, total)
    block = groups.rows(heads)
    slab = min(slab or slab_rows(total, tokens), tokens)
    splits = splits_of(slab, block, total)
    by_rows = bool(request.attributes.get("rows", False))
    score: dict[str, Any] = {
        "T": total,
        "H": heads,
        "SCALE": float(request.attributes["scale"]),
        "Q_STRIDE": q.stride[1:],
        "WEIGHT_STRIDE": weights.stride[1:],
        "TABLE_STRIDE": table.stride[1],
        "QUANTISED": True,
        "SPLITS": splits,
        "STAGES": STAGES,
        "REGISTERS": groups.own,
        "BY_QUARTERS": heads == 64,
        "QUERIES": groups.queries,
    }
    select = slab_selection(request, total, slab, splits)
    score_options: dict[str, Any] = {"num_warps": 4, "maxnreg": groups.registers}
    select_options: dict[str, Any] = {"num_warps": WARPS, "maxnreg": 128}
    route = f"many rows, two launches a slab of {slab} rows"
    constants = {
        "route": route,
        "block": block,
        "codes": (slab, total),
        "peaks": (slab, splits),
        "kept": (slab, total if select["TILES"] > 1 else 0),
        "picked": (batch, tokens, select["K"]),
        "rows": by_rows,
        "score_prompt": score,
        "score_options": score_options,
        "select_codes": select,
        "select_options": select_options,
    }
    text = render("lightning_indexer_prompt", constants)
    operands: dict[str, TensorSpec | str | None] = {
        "q": q,
        "weights": weights,
        "lengths": None if lengths is None else "int32",
        "block_table": table,
        "codes": "int32",
        "peaks": "int32",
    }
    scoring = with_tiles(ahead_of_time("score_prompt", operands, score, score_options), True)
    signature = {**scoring.signature, "sequence": "i32", "rows": "i32"}
    scoring = KernelLaunch(scoring.function, signature, scoring.constants, ("codes", "peaks"), score_options)
    first = None if lengths is None else "int32"
    selecting = selection(first, table if by_rows else None, select, select_options)
    # Slabs begin at addresses of their own.
    selecting = replace(selecting, divisible=("codes", "peaks", "kept"))
    return KernelModule(text, (scoring, selecting), route=route)
