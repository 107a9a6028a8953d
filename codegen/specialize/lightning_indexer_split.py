"""The Lightning Indexer in two launches on Hopper: where it serves and wins, and how rows are divided in either launch.

All rules read shapes alone. A row's scores are divided among as many programs as fit the device at once; its selection
among few, a cluster, since these meet.
"""

from dataclasses import dataclass
from typing import Any

from kimigraph.codegen.kernel import KernelLaunch, KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.lightning_indexer_hopper import PAGE, WIDTH, fit_a_few_rows
from kimigraph.codegen.specialize.rendering import (
    ahead_of_time,
    ceil_div,
    is_hopper,
    needed,
    padded,
    programs_at_once,
    render,
)

PROGRAMS = 4  # of the scores that fit a multiprocessor at once
STAGES = 5
PAGES_EACH, MOST_SHORT = 16, 64  # beyond one wave: programs of so many pages balance better, up to so many a row
EACH = 8  # codes in a row a thread
WARPS = 16
ONE_ROW = 1024  # pages of the only row up to which a program a multiprocessor scores fastest: all read one query
ALONE = 8192  # codes of a row from which one program selects fastest alone
HELD = 1024  # codes of a warp that stay in registers
TILE = 512  # codes of a warp a tile, where a slice takes several
MOST_CTAS = 16  # of a cluster
TEMPLATES = {
    "select_codes": "lightning_indexer_split",
    "select_bounded": "lightning_indexer_bounded",
}
MOST_BOUND = 1 << 17  # codes of a row of which a bit each fits shared memory
KEYS_A_PICK = 64, 512  # for each winner, from which a bound pays: of one row or codes past the L2 cache, else
TOPS_WANTED, PICKS_BOUND = 1024, 2  # least tops of a row, and for each winner
POOLED = 1024, 4096  # codes that pools of a row have room for, at least and at most
STAYING = 1 << 22  # codes of all rows up to which they are to stay in the L2 cache


@dataclass(frozen=True)
class Division:
    """How the launches divide a row: ``splits`` programs score it, ``ctas`` select from it, of ``warps`` warps each, in
    ``tiles`` tiles of ``columns`` codes a warp."""

    splits: int
    stages: int
    ctas: int
    warps: int
    columns: int
    tiles: int

    def text(self) -> str:
        """For people."""
        return f"two launches: {self.splits} programs a row score, {self.ctas} select"


def serves(request: KernelRequest) -> bool:
    """Whether the kernels can compute the request, on Hopper: sizes, types, strides."""
    return fit_a_few_rows(request) and needed(request, "keys").aligned


def wins(request: KernelRequest) -> bool:
    """Whether this is the fastest form: on Hopper, wherever it serves."""
    return is_hopper(request.target)


def division(rows: int, total: int, target: str) -> Division:
    """How ``rows`` rows of ``total`` keys are divided. All programs of a selection that meets run at once."""
    pages = total // PAGE
    at_once = programs_at_once(target, 1 if rows == 1 and pages <= ONE_ROW else PROGRAMS)
    splits = max(min(at_once // rows, pages), min(pages // PAGES_EACH, MOST_SHORT), 1)
    splits = 1 << (splits.bit_length() - 1)
    # Shorter slices pay until the larger cluster costs more than they save.
    slice_ = 8192 if rows == 1 or total <= 65536 else 16384
    ctas = 1 if total <= ALONE else padded(ceil_div(total, slice_))
    # Half of the multiprocessors select faster than all of them, as long as each row has two.
    at_once = programs_at_once(target, 1)
    ctas = min(ctas, max(at_once // (2 * rows), min(at_once // rows, 2), 1), MOST_CTAS)
    return _division(splits, min(ceil_div(pages, splits), STAGES), 1 << (ctas.bit_length() - 1), total)


def selection_of(rows: int, total: int, picks: int) -> str:
    """The kernel that selects: it looks at few codes where the largest of groups of keys bound the last winner well."""
    each = KEYS_A_PICK[0] if rows == 1 or rows * total >= STAYING else KEYS_A_PICK[1]
    return "select_bounded" if ALONE < total <= MOST_BOUND and each * picks <= total else "select_codes"


def bounded_constants(plan: Division, total: int, picks: int) -> dict[str, Any]:
    """What ``select_bounded`` has beside ``select_codes``: how many tiles of a program make a group of keys, how many
    groups of 16 keys each there are, and sizes of the pool."""
    tiles = ceil_div(total // PAGE, plan.splits)
    most = total // 16 // max(PICKS_BOUND * picks, TOPS_WANTED)
    each = max(min(most, tiles), 1)
    each = 1 << (each.bit_length() - 1)
    tops = ceil_div(tiles, each) * plan.splits * 4
    return {
        "TOPS": tops,
        "TOP_TILES": each,
        "GROUPS": max(padded(ceil_div(tops, plan.warps)), 32),
        "POOL": min(max(padded(2 * picks), POOLED[0]), POOLED[1]),
        "MARKS": max(padded(total // 32), 2048),
    }


def _division(splits: int, stages: int, ctas: int, total: int) -> Division:
    # In the largest cluster half the warps are faster, as long as they hold a slice.
    warps = WARPS // 2 if ctas == MOST_CTAS and total <= ctas * WARPS // 2 * HELD else WARPS
    columns = max(padded(ceil_div(total, ctas * warps)), 32 * EACH)
    columns = columns if columns <= HELD else TILE
    return Division(splits, stages, ctas, warps, columns, ceil_div(total, ctas * warps * columns))


def build(request: KernelRequest, *, ctas: int | None = None, selects: str | None = None) -> KernelModule:
    """Needs ``serves(request)``. ``ctas`` overrides how many programs select from a row, a power of two; ``selects`` by
    which kernel, a key of ``TEMPLATES``."""
    q, keys, weights = needed(request, "q"), needed(request, "keys"), needed(request, "weights")
    lengths, table = request.tensors.get("lengths"), request.tensors.get("block_table")
    batch, tokens, heads = q.shape[:3]
    rows = batch * tokens
    total = keys.shape[1] if table is None else table.shape[1] * PAGE
    quantised = keys.dtype == "uint8"
    by_rows = bool(request.attributes.get("rows", False))
    plan = division(rows, total, request.target)
    if ctas is not None:
        plan = _division(plan.splits, plan.stages, ctas, total)
    name = selects or selection_of(rows, total, int(request.attributes["k"]))
    length_stride = 0 if lengths is None or lengths.shape in ((), (1,)) else lengths.stride[0]
    table_stride = (0, 0) if table is None else table.stride
    score: dict[str, Any] = {
        "S": tokens,
        "T": total,
        "H": heads,
        "SCALE": float(request.attributes["scale"]),
        "Q_STRIDE": q.stride,
        "WEIGHT_STRIDE": weights.stride,
        "LENGTH_STRIDE": length_stride,
        "TABLE_STRIDE": table_stride,
        "PAGED": table is not None,
        "QUANTISED": quantised,
        "SPLITS": plan.splits,
        "PAGES": 1,
        "STAGES": plan.stages,
        "STAY": rows * total <= STAYING,
        "TOP_TILES": 1,
    }
    score_options = {"num_warps": 4, "maxnreg": 64 if heads <= 64 else 96, "launch_pdl": True}
    select, select_options = selection_constants(request, plan, total, length_stride)
    route = plan.text()
    if name == "select_bounded":
        route += " among few codes"
        select |= bounded_constants(plan, total, select["K"])
        score["TOP_TILES"] = select["TOP_TILES"]
    constants = {
        "route": route,
        "codes": (rows, total),
        "tops": (rows, select.get("TOPS", 0)),
        "peaks": (rows, plan.splits),
        "kept": (rows, total if plan.tiles > 1 else 0),
        "picked": (batch, tokens, select["K"]),
        "rows": by_rows,
        "score_grid": (rows * plan.splits,),
        "select_grid": (rows,),
        "score_rows": score,
        "score_options": score_options,
        name: select,
        "select_options": select_options,
    }
    text = render(TEMPLATES[name], constants)
    scratch = {"codes": "int32", "tops": "int32" if name == "select_bounded" else None, "peaks": "int32"}
    operands: dict[str, TensorSpec | str | None] = {
        "q": q,
        "weights": weights,
        "lengths": lengths,
        "block_table": table,
        **scratch,
    }
    scoring = with_tiles(ahead_of_time("score_rows", operands, score, score_options), quantised)
    selecting = selection(lengths, table if by_rows else None, select, select_options, name)
    return KernelModule(text, (scoring, selecting), route=route)


def selection_constants(
    request: KernelRequest, plan: Division, total: int, length_stride: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The constants and options of ``select_codes`` over rows of ``total`` codes."""
    table = request.tensors.get("block_table")
    by_rows = table is not None and bool(request.attributes.get("rows", False))
    constants: dict[str, Any] = {
        "S": needed(request, "q").shape[1],
        "T": total,
        "K": int(request.attributes["k"]),
        "LENGTH_STRIDE": length_stride,
        "TABLE_STRIDE": table.stride if table is not None and by_rows else (0, 0),
        "SPLITS": plan.splits,
        "CTAS": plan.ctas,
        "EACH": EACH,
        "COLUMNS": plan.columns,
        "TILES": plan.tiles,
        "SAMPLE": ceil_div(plan.tiles, 2),
    }
    options: dict[str, Any] = {"num_warps": plan.warps, "launch_pdl": True}
    if plan.ctas > 1:
        options["num_ctas"] = plan.ctas
    return constants, options


def selection(
    lengths: TensorSpec | str | None, table: TensorSpec | None, constants: dict[str, Any], options: dict[str, Any],
    name: str = "select_codes",
) -> KernelLaunch:  # fmt: skip
    """The launch of a selection; ``table`` where it lists rows of the cache."""
    names = {
        "select_codes": ("codes", "peaks", "kept", "picked"),
        "select_bounded": ("codes", "tops", "peaks", "kept", "picked"),
    }
    operands: dict[str, TensorSpec | str | None] = dict.fromkeys(names[name], "int32")
    operands |= {"lengths": lengths, "block_table": table}
    return ahead_of_time(name, operands, constants, options)


def with_tiles(launch: KernelLaunch, quantised: bool) -> KernelLaunch:
    """The launch with its descriptors of the cache in front: pages of keys, and of scales where there are any."""
    keys = shared_tile("fp8e4nv" if quantised else "bf16", [PAGE, WIDTH], 128, 8 if quantised else 16)
    signature, constants = {"tiles": keys}, dict(launch.constants)
    if quantised:
        signature["scale_rows"] = shared_tile("fp32", [1, PAGE], 0, 32)
    else:
        constants["scale_rows"] = None
    return KernelLaunch(launch.function, signature | launch.signature, constants, launch.divisible, launch.options)


def shared_tile(dtype: str, block: list[int], swizzle: int, bits: int) -> str:
    """The type of a descriptor of ``block`` tiles as Triton spells it."""
    layout = f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={len(block)})"
    return f"tensordesc<{dtype}{block},{layout}>"
