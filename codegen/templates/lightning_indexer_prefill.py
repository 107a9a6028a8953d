# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Lightning Indexer and exact top k over many query rows, in one launch whose memory does not grow with them.

A program takes ROWS query rows at a time and passes once over the keys that they see. Scores of GROUP keys are staged,
and what may still win goes to the rows' buffers (``running_selection``). Programs share nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from kimigraph.codegen.templates.cache_rows import listed_id
from kimigraph.codegen.templates.order_code import order_code
from kimigraph.codegen.templates.running_selection import append_codes, keep_winners, last_winners, list_winners

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def tile_entry(block_table, sequence, page, TABLE_STRIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """The page of 64 keys that holds logical page ``page``, or that page itself.

    The load is spelled out: the compiler would take an ordinary one through shared memory, with barriers, in a loop.
    """
    entry = page
    if block_table is not None:
        place = block_table + sequence * TABLE_STRIDE[0] + page * TABLE_STRIDE[1]
        if INTERPRET:
            entry = tl.load(place).to(tl.int32)
        else:
            entry = tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=r,l", [place.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
            )
    return entry


@triton.jit
def tile_keys(
    tiles, sequence, entry, UNIT: tl.constexpr, WHOLE: tl.constexpr, QUANTISED: tl.constexpr, INTERPRET: tl.constexpr
):
    """[64, 128] keys. A unit, page or sequence, is UNIT rows of 128 elements, WHOLE when it is a sequence."""
    entry = tl.maximum(entry, 0)
    if WHOLE:
        first = sequence.to(tl.int32) * UNIT + entry * 64
    else:
        first = entry * UNIT
    if INTERPRET:
        slot = (first + tl.arange(0, 64)[:, None]).to(tl.int64) * 128 + tl.arange(0, 128)[None, :]
        typed = tiles.to(tl.pointer_type(tl.float8e4nv)) if QUANTISED else tiles
        tile = tl.load(typed + slot).to(tl.float32)
    else:
        tile = tiles.load([first, 0])
    return tile


@triton.jit
def query_tile(q_block, token, S: tl.constexpr, H: tl.constexpr, Q_STRIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """[128 channels, 128]: the heads of 128 / H query rows side by side; zeros past the last row."""
    column = tl.arange(0, 128)
    channel = tl.arange(0, 128)
    row = token + column // H
    place = q_block + (row.to(tl.int64) * Q_STRIDE[1] + (column % H) * Q_STRIDE[2])[None, :]
    query = tl.load(place + channel[:, None] * Q_STRIDE[3], mask=(row < S)[None, :], other=0.0)
    return query.to(tl.float32) if INTERPRET else query


@triton.jit
def head_weights(weights, token, S: tl.constexpr, H: tl.constexpr, SCALE: tl.constexpr, STRIDE: tl.constexpr):
    """The weights of those heads, [128]."""
    column = tl.arange(0, 128)
    row = token + column // H
    place = weights + row.to(tl.int64) * STRIDE[1] + (column % H) * STRIDE[2]
    return tl.load(place, mask=row < S, other=0.0).to(tl.float32) * SCALE


@triton.jit
def stage_scores(tile, query, weight, stage, H: tl.constexpr, GROUP: tl.constexpr, INTERPRET: tl.constexpr):
    """Stage the scores of 64 keys, without the keys' scales, for 128 / H query rows. A NaN reaches the sum.

    The store is spelled out: an ordinary one would first move the scores through shared memory to suit itself.
    """
    PACK: tl.constexpr = 128 // H
    dots = tl.dot(tile, query, input_precision="ieee")
    weighted = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    score = tl.sum(tl.reshape(weighted, (64, PACK, H)), 2)
    place = stage + tl.arange(0, PACK)[None, :] * GROUP + tl.arange(0, 64)[:, None]
    if INTERPRET:
        tl.store(place, score)
    else:
        tl.inline_asm_elementwise(
            "st.global.b32 [$1], $2; mov.b32 $0, 0;", "=r,l,r", [place.to(tl.int64), score], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def staged_codes(
    stage, keys, block_table, sequence, start, limit, T: tl.constexpr, UNIT: tl.constexpr, QUANTISED: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Order codes [ROWS, GROUP] of the staged scores of positions from ``start`` on; 0 for hidden keys."""
    row = tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, GROUP)
    position = start + lane
    inside = position < tl.max(limit, 0)
    visible = position[None, :] < limit[:, None]
    score = tl.load(stage + row * GROUP + lane[None, :], mask=visible, other=0.0)
    if block_table is not None:
        entry = block_table + sequence * TABLE_STRIDE[0] + (position // 64).to(tl.int64) * TABLE_STRIDE[1]
        page = tl.load(entry, mask=inside, other=-1).to(tl.int64)
        visible = visible & (page >= 0)[None, :]
        inside = inside & (page >= 0)
        # Scales lie behind the keys of their page.
        scale_at = page * (UNIT * 32) + 2048 + position % 64
    else:
        scale_at = sequence * (UNIT * 32) + T * 32 + position
    if QUANTISED:
        scales = tl.load(keys.to(tl.pointer_type(tl.float32)) + scale_at, mask=inside, other=0.0)
        score = score * scales[None, :]
    return tl.where(visible, order_code(score), 0)


@triton.jit
def list_all(
    out, limit, last_row, block_table, sequence, K: tl.constexpr, ROWS: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    LIST_ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The rows of queries that see no more than K keys: all of them."""
    row = tl.arange(0, ROWS)[:, None]
    for start in range(0, K, CHUNK):
        slot = start + tl.arange(0, CHUNK)[None, :] + row * 0
        seen = slot < limit[:, None]
        listed = listed_id(slot, seen, block_table, sequence, TABLE_STRIDE, 64, LIST_ROWS)
        tl.store(out + row * K + slot, tl.where(seen, listed, -1), mask=(slot < K) & (row < last_row))


@triton.jit
def all_mapped(block_table, sequence, pages, K: tl.constexpr, TABLE_STRIDE: tl.constexpr, MOST: tl.constexpr):
    """Whether the first ``pages`` pages, no more than MOST, exist."""
    if block_table is not None:
        page = tl.arange(0, MOST)
        entry = block_table + sequence * TABLE_STRIDE[0] + page.to(tl.int64) * TABLE_STRIDE[1]
        mapped = tl.min(tl.load(entry, mask=page < pages, other=0), 0) >= 0
    else:
        mapped = tl.full([], 1, tl.int1)
    return mapped


@triton.jit
def index_rows(
    tiles, q, keys, weights, lengths, block_table, stage, found, places, picked,
    B: tl.constexpr, S: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    Q_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, LENGTH_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    UNIT: tl.constexpr, WHOLE: tl.constexpr, QUANTISED: tl.constexpr, TILES: tl.constexpr,
    GROUP: tl.constexpr,
    CAPACITY: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, PROGRAMS: tl.constexpr,
    MOST_PAGES: tl.constexpr, LIST_ROWS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Blocks of TILES x 128 / H query rows, the longest first; scratch belongs to the program."""
    PACK: tl.constexpr = 128 // H
    ROWS: tl.constexpr = TILES * PACK
    program = tl.program_id(0).to(tl.int64)
    stage += program * (ROWS * GROUP)
    found += program * (ROWS * CAPACITY)
    places += program * (ROWS * CAPACITY)
    row = tl.arange(0, ROWS)
    for step in range(0, tl.cdiv(BLOCKS - tl.program_id(0), PROGRAMS)):
        block = tl.program_id(0) + step * PROGRAMS
        sequence = (block % B).to(tl.int64)
        token = ((BLOCKS - 1 - block) // B) * ROWS
        limit = tl.full([ROWS], T, tl.int64)
        if lengths is not None:
            limit = tl.minimum(tl.load(lengths + sequence * LENGTH_STRIDE).to(tl.int64) + token + row, T)
        limit = tl.where(token + row < S, tl.maximum(limit, 0), 0).to(tl.int32)
        reach = tl.max(limit, 0)
        pages = tl.cdiv(reach, 64)
        out = picked + (sequence * S + token) * K
        last_row = tl.minimum(ROWS, S - token)
        if (reach <= K) & all_mapped(block_table, sequence, pages, K, TABLE_STRIDE, MOST_PAGES):
            list_all(out, limit, last_row, block_table, sequence, K, ROWS, TABLE_STRIDE, LIST_ROWS, CHUNK)
        else:
            q_block = q + sequence * Q_STRIDE[0]
            weight_block = weights + sequence * WEIGHT_STRIDE[0]
            query_a = query_tile(q_block, token, S, H, Q_STRIDE, INTERPRET)
            weight_a = head_weights(weight_block, token, S, H, SCALE, WEIGHT_STRIDE)
            query_b = query_a
            weight_b = weight_a
            if TILES == 2:
                query_b = query_tile(q_block, token + PACK, S, H, Q_STRIDE, INTERPRET)
                weight_b = head_weights(weight_block, token + PACK, S, H, SCALE, WEIGHT_STRIDE)
            threshold = tl.zeros([ROWS], tl.uint32)
            count = tl.zeros([ROWS], tl.int32)
            for start in range(0, reach, GROUP):
                first = start // 64
                for page in range(first, tl.minimum(first + GROUP // 64, pages)):
                    # A pipelined loop reads entries ahead, and the load that is spelled out can not be masked.
                    held = tl.minimum(page, pages - 1)
                    entry = tile_entry(block_table, sequence, held, TABLE_STRIDE, INTERPRET)
                    tile = tile_keys(tiles, sequence, entry, UNIT, WHOLE, QUANTISED, INTERPRET)
                    slot = stage + (page - first) * 64
                    stage_scores(tile, query_a, weight_a, slot, H, GROUP, INTERPRET)
                    if TILES == 2:
                        stage_scores(tile, query_b, weight_b, slot + PACK * GROUP, H, GROUP, INTERPRET)
                tl.debug_barrier()
                code = staged_codes(
                    stage, keys, block_table, sequence, start, limit, T, UNIT, QUANTISED, TABLE_STRIDE, ROWS, GROUP
                )
                count = append_codes(code, found, places, start, threshold, count, ROWS, GROUP, CAPACITY)
                # Nobody may stage again before all have read.
                tl.debug_barrier()
                if tl.max(count, 0) > CAPACITY - GROUP:
                    last, ties = last_winners(found, count, K, ROWS, CAPACITY, CHUNK)
                    keep_winners(found, places, count, last, ties, ROWS, CAPACITY, CHUNK)
                    threshold = tl.where(count > K, last, threshold)
                    count = tl.minimum(count, K)
            last, ties = last_winners(found, count, K, ROWS, CAPACITY, CHUNK)
            list_winners(
                found, places, count, last, ties, out, last_row, block_table, sequence, K, ROWS, CAPACITY,
                TABLE_STRIDE, LIST_ROWS, CHUNK,
            )  # fmt: skip
            tl.debug_barrier()


def launch(q, keys, weights, lengths=None, mask=None, block_table=None, q_scales=None, *, memory=torch):
    """The operator's tensors in schema order -> int32 [B, S, k]."""
    del mask
    scratch = {"dtype": torch.int32, "device": q.device}
    stage = memory.empty(CONSTANTS["stage"], dtype=torch.float32, device=q.device)
    found, places, picked = (memory.empty(CONSTANTS[name], **scratch) for name in ("found", "found", "picked"))
    constants = CONSTANTS["index_rows"]
    tiles = keys
    if not INTERPRET:
        rows = keys.view(-1, 128)
        rows = rows.view(torch.float8_e4m3fn) if constants["QUANTISED"] else rows
        tiles = TensorDescriptor(rows, list(rows.shape), [128, 1], [64, 128])
    index_rows[CONSTANTS["grid"]](
        tiles, q, keys, weights, lengths, block_table, stage, found, places, picked,
        **{**constants, "INTERPRET": INTERPRET}, **CONSTANTS["options"],
    )  # fmt: skip
    return picked
