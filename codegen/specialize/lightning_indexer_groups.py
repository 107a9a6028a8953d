"""The Lightning Indexer in two launches on Hopper for MXFP8 keys in groups of 32: where it serves and wins.

Rows are divided as those of plain keys are; only the scores differ.
"""

from dataclasses import dataclass, replace
from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.lightning_indexer_hopper import MOST_ROWS, PAGE, WIDTH
from kimigraph.codegen.specialize.lightning_indexer_split import (
    PROGRAMS,
    STAYING,
    bounded_constants,
    division,
    selection,
    selection_constants,
    selection_of,
    with_tiles,
)
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, is_hopper, needed, programs_at_once, render
from kimigraph.ir.descriptors import IndexKeyDescriptor, parse_descriptor

GROUP = 32
PAGES_EACH = 64
TEMPLATES = {
    "select_codes": "lightning_indexer_groups",
    "select_bounded": "lightning_indexer_groups_bounded",
}


def serves(request: KernelRequest) -> bool:
    """Whether the kernels can compute the request, on Hopper."""
    q = needed(request, "q")
    return fit_groups(request) and q.shape[0] * q.shape[1] <= MOST_ROWS


def fit_groups(request: KernelRequest) -> bool:
    """Whether the operands are what forms for few rows and for many take: formats, sizes, strides."""
    q, keys, weights = needed(request, "q"), needed(request, "keys"), needed(request, "weights")
    scales, table = request.tensors.get("q_scales"), request.tensors.get("block_table")
    heads, width = q.shape[-2:]
    total = keys.shape[1] if table is None else table.shape[1] * keys.shape[1]
    return (
        (_real_words(q) if scales is None else _in_words(q) and _in_words(scales))
        and bool(request.attributes.get("quantises_q", False)) == (scales is None)
        and _group(request) == GROUP
        and request.tensors.get("mask") is None
        and (keys.shape[1] == PAGE if table is not None else total % PAGE == 0)
        and width == WIDTH
        and heads in (16, 32, 64, 128)
        and tuple(keys.stride) == (keys.shape[1] * keys.shape[2], keys.shape[2], 1)
        and keys.aligned
        and 0 not in q.shape
        and total > 0
        and 0 < int(request.attributes["k"]) <= 8192
        and weights.dtype in ("float32", "bfloat16", "float16")
    )


def wins(request: KernelRequest) -> bool:
    """Whether this is the fastest form: on Hopper, wherever it serves."""
    return is_hopper(request.target)


def _group(request: KernelRequest) -> int:
    text = str(request.attributes.get("descriptor", ""))
    form = parse_descriptor(text) if text else None
    return form.group or 0 if isinstance(form, IndexKeyDescriptor) else 0


def _in_words(spec: TensorSpec) -> bool:
    """Whether rows of bytes can be read four at a time."""
    strides = (stride for stride, size in zip(spec.stride[:-1], spec.shape[:-1], strict=True) if size > 1)
    return (
        spec.aligned and spec.dtype == "uint8" and spec.stride[-1] == 1 and all(stride % 4 == 0 for stride in strides)
    )


def _real_words(spec: TensorSpec) -> bool:
    """Whether rows of bf16 can be read two at a time."""
    strides = (stride for stride, size in zip(spec.stride[:-1], spec.shape[:-1], strict=True) if size > 1)
    return spec.aligned and spec.dtype == "bfloat16" and spec.stride[-1] == 1 and all(s % 2 == 0 for s in strides)


@dataclass(frozen=True)
class Shape:
    """How a program scores: ``consumers`` splits of a row, four warps each, through ``stages`` of 64 keys; threads have
    ``registers`` in the mean. In fp16 where ``half``, else in bf16."""

    consumers: int
    stages: int
    registers: int
    half: bool


ALONE = Shape(1, 4, 64, False)  # five stages leave room for three programs a multiprocessor, not four
TOGETHER = Shape(4, 8, 96, False)  # the only program of a multiprocessor: queries are brought once
LONG = Shape(4, 8, 96, True)
MANY_KEYS = 1 << 19  # of all rows, from which half the instructions pay for a longer kernel


def shape_of(rows: int, total: int, heads: int, splits: int, target: str) -> Shape:
    """What is fastest."""
    if heads > 64:
        return replace(ALONE, registers=96)
    if splits % 4 or rows * splits < 7 * programs_at_once(target, 1) // 2:
        return ALONE
    return LONG if rows * total >= MANY_KEYS else TOGETHER


def splits_of(rows: int, pages: int, target: str) -> int:
    """How many share the scores of a row, a power of two: four a multiprocessor. Beyond one wave a program's queries
    cost more to bring than those of plain keys do."""
    most = max(min(programs_at_once(target, PROGRAMS) // rows, pages), pages // PAGES_EACH, 1)
    return 1 << (most.bit_length() - 1)


def build(request: KernelRequest, *, shape: Shape | None = None, selects: str | None = None) -> KernelModule:
    """Needs ``serves(request)``. ``shape`` overrides how a program scores, ``selects`` which kernel selects, a key of
    ``TEMPLATES``."""
    q, keys, weights = needed(request, "q"), needed(request, "keys"), needed(request, "weights")
    scales = request.tensors.get("q_scales")
    lengths, table = request.tensors.get("lengths"), request.tensors.get("block_table")
    batch, tokens, heads = q.shape[:3]
    rows = batch * tokens
    total = keys.shape[1] if table is None else table.shape[1] * PAGE
    top = int(request.attributes["k"])
    by_rows = bool(request.attributes.get("rows", False))
    plan = replace(division(rows, total, request.target), splits=splits_of(rows, total // PAGE, request.target))
    shape = shape or shape_of(rows, total, heads, plan.splits, request.target)
    parts = plan.splits // shape.consumers
    name = selects or selection_of(rows, total, top)
    length_stride = 0 if lengths is None or lengths.shape in ((), (1,)) else lengths.stride[0]
    score: dict[str, Any] = {
        "S": tokens,
        "T": total,
        "H": heads,
        "SCALE": float(request.attributes["scale"]),
        "Q_STRIDE": q.stride,
        "Q_SCALE_STRIDE": (0, 0, 0, 0) if scales is None else scales.stride,
        "WEIGHT_STRIDE": weights.stride,
        "LENGTH_STRIDE": length_stride,
        "TABLE_STRIDE": (0, 0) if table is None else table.stride,
        "PAGED": table is not None,
        "PLANE": keys.shape[1],
        "SPLITS": plan.splits,
        "CONSUMERS": shape.consumers,
        "STAGES": min(ceil_div(total // PAGE, parts), shape.stages),
        "STAY": rows * total <= STAYING,
        "TOP_TILES": 1,
        "FP16": shape.half,
        "REGISTERS": own_registers(shape),
    }
    score_options = {"num_warps": 4, "maxnreg": shape.registers, "launch_pdl": True}
    select, select_options = selection_constants(request, plan, total, length_stride)
    route = f"MXFP8, {plan.text()}"
    if name == "select_bounded":
        route += " among few codes"
        select |= bounded_constants(plan, total, top)
        score["TOP_TILES"] = select["TOP_TILES"]
    constants = {
        "route": route,
        "codes": (rows, total),
        "tops": (rows, select.get("TOPS", 0)),
        "peaks": (rows, plan.splits),
        "kept": (rows, total if plan.tiles > 1 else 0),
        "picked": (batch, tokens, top),
        "rows": by_rows,
        "score_grid": (rows * parts,),
        "select_grid": (rows,),
        "score_group_rows": score,
        "score_options": score_options,
        name: select,
        "select_options": select_options,
    }
    operands: dict[str, TensorSpec | str | None] = {
        "q": q,
        "q_scales": scales,
        "weights": weights,
        "lengths": lengths,
        "block_table": table,
        "codes": "int32",
        "tops": "int32" if name == "select_bounded" else None,
        "peaks": "int32",
    }
    scoring = with_tiles(ahead_of_time("score_group_rows", operands, score, score_options), True)
    selecting = selection(lengths, table if by_rows else None, select, select_options, name)
    return KernelModule(render(TEMPLATES[name], constants), (scoring, selecting), route=route)


def own_registers(shape: Shape) -> int:
    """Of each thread that multiplies: those of the four warps that fetch have 24."""
    return (shape.registers * (shape.consumers + 1) - 24) // shape.consumers // 8 * 8
