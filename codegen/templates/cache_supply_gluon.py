# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""The warps that bring cache rows to shared memory as bf16, for the warps that compute with them."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kimigraph.codegen.templates.cache_rows import row_offsets


@gluon.jit
def two_halves(scale):
    """fp32 -> two bf16 that add up to its first 16 bits of mantissa, each twice in the 32 bits of an int."""
    bits = scale.to(gl.uint32, bitcast=True)
    high = bits & 0xFFFF0000
    low = (scale - high.to(gl.float32, bitcast=True)).to(gl.uint32, bitcast=True) & 0xFFFF0000
    return (high | (high >> 16)).to(gl.int32, bitcast=True), (low | (low >> 16)).to(gl.int32, bitcast=True)


@gluon.jit
def scaled_e4m3(four, high, low):
    """The four e4m3 bytes of an int -> bf16 of value * scale, two ints of two; ``high`` and ``low`` are
    ``two_halves(scale * 2 ** 120)``.

    A byte is extended by its sign and shifted, which brings sign, exponent and mantissa to their bf16 places: the value
    is then 2 ** -120 times too small.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a0, a1, m0, m1;
        prmt.b32 a0, $2, 0, 0x9180;
        prmt.b32 a1, $2, 0, 0xb3a2;
        shl.b32 a0, a0, 4;
        shl.b32 a1, a1, 4;
        and.b32 a0, a0, 0x87f087f0;
        and.b32 a1, a1, 0x87f087f0;
        mul.rn.bf16x2 m0, a0, $4;
        mul.rn.bf16x2 m1, a1, $4;
        fma.rn.bf16x2 $0, a0, $3, m0;
        fma.rn.bf16x2 $1, a1, $3, m1;
        }
        """,
        "=r,=r,r,r,r",
        [four, high, low],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def listed_rows(indices, block_table, sequence, pick, limit, CACHE: gl.constexpr, INDEX_STRIDE: gl.constexpr):
    """Where the rows of some picks stand, and which exist; without a list, pick i is row i."""
    if indices is None:
        index = gl.where(pick < limit, pick, -1)
    else:
        index = gl.load(indices + pick * INDEX_STRIDE, mask=pick < limit, other=-1)
    T: gl.constexpr = CACHE[0]
    PAGE: gl.constexpr = CACHE[1]
    TABLE_STRIDE: gl.constexpr = CACHE[2]
    page, slot, exists = row_offsets(block_table, sequence, index, T, TABLE_STRIDE, PAGE)
    return page, slot, exists


@gluon.jit
def fetch_ints(base, page, slot, exists, first: gl.constexpr, INTS: gl.constexpr, EACH: gl.constexpr,
               PAGE_STRIDE: gl.constexpr, SLOT_STRIDE: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """INTS times 32 bits of each row from ``first`` on; zeros where a row does not exist, whatever the cache holds.

    ``EACH`` elements of ``base`` make 32 bits; strides count elements.
    """
    column = gl.expand_dims(first + gl.arange(0, INTS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    page = gl.convert_layout(page, gl.SliceLayout(1, LAYOUT))
    slot = gl.convert_layout(slot, gl.SliceLayout(1, LAYOUT))
    exists = gl.convert_layout(exists, gl.SliceLayout(1, LAYOUT))
    row = gl.expand_dims(page * (PAGE_STRIDE // EACH) + slot * (SLOT_STRIDE // EACH), 1)
    return gl.load(base.to(gl.pointer_type(gl.int32)) + (row + column), mask=gl.expand_dims(exists, 1), other=0)


@gluon.jit
def fetch_quarter(latent, page, slot, exists, quarter: gl.constexpr, CACHE: gl.constexpr, LAYOUT: gl.constexpr):
    """128 stored columns of the rows."""
    PAGE_STRIDE: gl.constexpr = CACHE[3][0]
    SLOT_STRIDE: gl.constexpr = CACHE[3][1]
    return fetch_ints(latent, page, slot, exists, quarter * 32, 32, 4, PAGE_STRIDE, SLOT_STRIDE, LAYOUT)


@gluon.jit
def fetch_rope(rope, page, slot, exists, CACHE: gl.constexpr, LAYOUT: gl.constexpr):
    """The rope part of the rows."""
    PAGE_STRIDE: gl.constexpr = CACHE[4][0]
    SLOT_STRIDE: gl.constexpr = CACHE[4][1]
    return fetch_ints(rope, page, slot, exists, 0, 32, 2, PAGE_STRIDE, SLOT_STRIDE, LAYOUT)


@gluon.jit
def fetch_scales(scales, page, slot, exists, CACHE: gl.constexpr, LAYOUT: gl.constexpr):
    """The scales of a row's four quarters times 2 ** 120."""
    PAGE_STRIDE: gl.constexpr = CACHE[5][0]
    SLOT_STRIDE: gl.constexpr = CACHE[5][1]
    bits = fetch_ints(scales, page, slot, exists, 0, 4, 1, PAGE_STRIDE, SLOT_STRIDE, LAYOUT)
    return bits.to(gl.float32, bitcast=True) * 1329227995784915872903807060280344576.0


@gluon.jit
def quarters_of(four, LAYOUT: gl.constexpr):
    """[rows, 4] -> four [rows], as the rows lie in ``LAYOUT``."""
    even, odd = gl.split(gl.reshape(four, [four.shape[0], 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    layout: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    return (
        gl.convert_layout(first, layout),
        gl.convert_layout(second, layout),
        gl.convert_layout(third, layout),
        gl.convert_layout(fourth, layout),
    )


@gluon.jit
def store_quarter(tile, half: gl.constexpr, stored, scale):
    """Write what the stored bytes of a quarter mean, as bf16, to one half of a tile."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    high, low = two_halves(scale)
    pair = scaled_e4m3(stored, gl.expand_dims(high, 1), gl.expand_dims(low, 1))
    ROWS: gl.constexpr = stored.shape[0]
    pairs = tile._reinterpret(gl.int32, [ROWS, 128], PAIRS).slice(half * 64, 64, dim=1)
    pairs.store(gl.reshape(gl.join(pair[0], pair[1]), [ROWS, 64]))


@gluon.jit
def supply_rows(
    latent, rope, scales, indices, block_table, sequence, first, limit, steps, tiles,
    CACHE: gl.constexpr, INDEX_STRIDE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Fill the two stages of tiles in turn, ROWS rows a step."""
    if scales is None:
        supply_copies(
            latent, rope, indices, block_table, sequence, first, limit, steps, tiles, CACHE, INDEX_STRIDE, ROWS
        )
    else:
        supply_conversions(
            latent, rope, scales, indices, block_table, sequence, first, limit, steps, tiles, CACHE, INDEX_STRIDE, ROWS
        )


@gluon.jit
def supply_conversions(
    latent, rope, scales, indices, block_table, sequence, first, limit, steps, tiles,
    CACHE: gl.constexpr, INDEX_STRIDE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Gather rows of e4m3, a step ahead in registers, and write them as bf16."""
    left, right, turned, shown, ready, free = tiles
    WARPS: gl.constexpr = gl.num_warps()
    # Four lanes a row: what eight lanes store at a time then lies in different banks.
    INTS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    FOURS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [WARPS, 1], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    pick = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, INTS))
    page, slot, exists = listed_rows(indices, block_table, sequence, pick, limit, CACHE, INDEX_STRIDE)
    x0 = fetch_quarter(latent, page, slot, exists, 0, CACHE, FOURS)
    x1 = fetch_quarter(latent, page, slot, exists, 1, CACHE, FOURS)
    x2 = fetch_quarter(latent, page, slot, exists, 2, CACHE, FOURS)
    x3 = fetch_quarter(latent, page, slot, exists, 3, CACHE, FOURS)
    keys = fetch_rope(rope, page, slot, exists, CACHE, INTS)
    four = fetch_scales(scales, page, slot, exists, CACHE, FOURS)
    for step in range(steps):
        stage = step & 1
        present = exists
        page, slot, exists = listed_rows(
            indices, block_table, sequence, pick + (step + 1) * ROWS, limit, CACHE, INDEX_STRIDE
        )
        s0, s1, s2, s3 = quarters_of(four, FOURS)
        mbarrier.wait(free.index(stage), ((step >> 1) & 1) ^ 1)
        store_quarter(left.index(stage), 0, x0, s0)
        x0 = fetch_quarter(latent, page, slot, exists, 0, CACHE, FOURS)
        store_quarter(left.index(stage), 1, x1, s1)
        x1 = fetch_quarter(latent, page, slot, exists, 1, CACHE, FOURS)
        store_quarter(right.index(stage), 0, x2, s2)
        x2 = fetch_quarter(latent, page, slot, exists, 2, CACHE, FOURS)
        store_quarter(right.index(stage), 1, x3, s3)
        x3 = fetch_quarter(latent, page, slot, exists, 3, CACHE, FOURS)
        turned.index(stage)._reinterpret(gl.int32, [ROWS, 32], PAIRS).store(keys)
        keys = fetch_rope(rope, page, slot, exists, CACHE, INTS)
        four = fetch_scales(scales, page, slot, exists, CACHE, FOURS)
        shown.index(stage).store(gl.where(present, 0.0, float("-inf")))
        fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(ready.index(stage), count=1)


@gluon.jit
def copy_ints(tile, base, page, slot, exists, first: gl.constexpr, PAGE_STRIDE: gl.constexpr,
              SLOT_STRIDE: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Have pairs of 16-bit columns copied to ``tile`` from int ``first`` on; zeros where no row exists."""
    column = gl.expand_dims(first + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT)), 0)
    row = gl.expand_dims(page * (PAGE_STRIDE // 2) + slot * (SLOT_STRIDE // 2), 1)
    place = base.to(gl.pointer_type(gl.int32)) + (row + column)
    async_copy.async_copy_global_to_shared(tile, place, mask=gl.expand_dims(exists, 1) & (column >= 0))


@gluon.jit
def supply_copies(
    latent, rope, indices, block_table, sequence, first, limit, steps, tiles,
    CACHE: gl.constexpr, INDEX_STRIDE: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """The same for rows of bf16, which go to shared memory as they are: two steps are on their way at a time."""
    left, right, turned, shown, ready, free = tiles
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    PAGE_STRIDE: gl.constexpr = CACHE[3][0]
    SLOT_STRIDE: gl.constexpr = CACHE[3][1]
    ROPE_PAGE_STRIDE: gl.constexpr = CACHE[4][0]
    ROPE_SLOT_STRIDE: gl.constexpr = CACHE[4][1]
    pick = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    page, slot, exists = listed_rows(indices, block_table, sequence, pick, limit, CACHE, INDEX_STRIDE)
    for step in range(steps):
        stage = step & 1
        next_page, next_slot, next_exists = listed_rows(
            indices, block_table, sequence, pick + (step + 1) * ROWS, limit, CACHE, INDEX_STRIDE
        )
        turned_ints = turned.index(stage)._reinterpret(gl.int32, [ROWS, 32], PAIRS)
        mbarrier.wait(free.index(stage), ((step >> 1) & 1) ^ 1)
        left_ints = left.index(stage)._reinterpret(gl.int32, [ROWS, 128], PAIRS)
        right_ints = right.index(stage)._reinterpret(gl.int32, [ROWS, 128], PAIRS)
        copy_ints(left_ints, latent, page, slot, exists, 0, PAGE_STRIDE, SLOT_STRIDE, LAYOUT)
        copy_ints(right_ints, latent, page, slot, exists, 128, PAGE_STRIDE, SLOT_STRIDE, LAYOUT)
        copy_ints(turned_ints, rope, page, slot, exists, 0, ROPE_PAGE_STRIDE, ROPE_SLOT_STRIDE, LAYOUT)
        async_copy.commit_group()
        shown.index(stage).store(gl.where(exists, 0.0, float("-inf")))
        page, slot, exists = next_page, next_slot, next_exists
        if step > 0:
            async_copy.wait_group(1)
            fence_async_shared()
            tl.debug_barrier()
            mbarrier.arrive(ready.index(stage ^ 1), count=1)
    if steps > 0:
        async_copy.wait_group(0)
        fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(ready.index((steps - 1) & 1), count=1)
