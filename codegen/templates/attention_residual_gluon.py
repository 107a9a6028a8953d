# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Attention residuals of a few tokens on Hopper: a cluster of multiprocessors shares a token's channels.

One multiprocessor alone fetches a token's sources at a fraction of the memory's rate. The parts exchange two sums a
source, and one for the norm, through one another's shared memory.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CONSTANTS: dict[str, Any] = {}


@gluon.constexpr_function
def spread(each, parts, warps):
    """The layout of a tensor whose first dim is spread over the programs of a cluster, the last over threads."""
    middle = [1] * (len(each) - 1)
    bases = [[1 << bit, *[0] * len(middle)] for bit in range(parts.bit_length() - 1)]
    order = list(range(len(each)))[::-1]
    return gl.BlockedLayout(each, [*middle, 32], [*middle, warps], order, bases)


@gluon.jit
def add_pairs(a, b, c, d):
    """The sum of two pairs, for one reduction of two tensors."""
    return a + c, b + d


@gluon.jit
def add_triples(a, b, c, d, e, f):
    """The same of three."""
    return a + d, b + e, c + f


@gluon.jit
def multiply(a, b):
    """For the product of two sources."""
    return a * b


@gluon.jit
def behind_earlier_kernels(number):
    """``number``, once all that came before this kernel has ended; what follows it may start already."""
    return gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.b32 $0, $1;",
        "=r,r",
        [number],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def over_cluster(first, second, row, EXCHANGE: gl.constexpr):
    """Sums of two values over the programs of the cluster; ``row`` < 32 is the place of a thread's value."""
    return gl.inline_asm_elementwise(
        EXCHANGE, "=f,=f,f,f,r", [first, second, row], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
    )


@gluon.jit
def three_over_cluster(first, second, third, row, EXCHANGE: gl.constexpr):
    """The same of three values."""
    return gl.inline_asm_elementwise(
        EXCHANGE,
        "=f,=f,=f,f,f,f,r",
        [first, second, third, row],
        dtype=(gl.float32, gl.float32, gl.float32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def meet_cluster(value):
    """``value``, once all programs of the cluster run: before that their shared memory must not be written."""
    return gl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned; mov.b32 $0, $1;",
        "=r,r",
        [value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def vector(pointer, channel, inside, STRIDE: gl.constexpr):
    """The elements of a weight in fp32, zero where not ``inside``."""
    return gl.load(pointer + channel * STRIDE, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def mix_cluster(
    source_0,
    source_1,
    source_2,
    source_3,
    source_4,
    source_5,
    source_6,
    source_7,
    source_8,
    query,
    norm_weight,
    out_norm_weight,
    out,
    D: gl.constexpr,
    N: gl.constexpr,
    EPS: gl.constexpr,
    OUT_EPS: gl.constexpr,
    SOURCE_STRIDE: gl.constexpr,
    WEIGHT_STRIDE: gl.constexpr,
    ROWS: gl.constexpr,
    PARTS: gl.constexpr,
    CHUNK: gl.constexpr,
    BLOCK: gl.constexpr,
    PAIR: gl.constexpr,
    EXCHANGE: gl.constexpr,
    EARLY: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Dims are [part of the channels, source, channel]; a program of the cluster has a part, a thread all sources."""
    WHOLE: gl.constexpr = spread([1, 1, 8], PARTS, WARPS)
    LANES: gl.constexpr = spread([1, 1], PARTS, WARPS)
    PART_ROWS: gl.constexpr = gl.SliceLayout(2, WHOLE)
    PART_COLUMNS: gl.constexpr = gl.SliceLayout(1, WHOLE)
    sources = (source_0, source_1, source_2, source_3, source_4, source_5, source_6, source_7, source_8)
    token = gl.program_id(0)
    if EARLY:
        token = behind_earlier_kernels(token)
    token = token.to(gl.int64)
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, PART_ROWS)), 0)
    part = gl.expand_dims(gl.arange(0, PARTS, layout=gl.SliceLayout(1, PART_COLUMNS)), 1)
    column = gl.expand_dims(gl.arange(0, BLOCK, layout=gl.SliceLayout(0, PART_COLUMNS)), 0)
    channel = part * CHUNK + column
    inside = (column < CHUNK) & (channel < D)
    place = source_0 + token * SOURCE_STRIDE[0] + row * 0
    for number in gl.static_range(1, N):
        place = gl.where(row == number, sources[number] + token * SOURCE_STRIDE[number], place)
    places = gl.multiple_of(gl.expand_dims(place, 2) + gl.expand_dims(channel, 1), (1, 1, 16))
    live = gl.expand_dims(inside, 1) & gl.expand_dims(row < N, 2)
    rows = gl.load(places, mask=live, other=0.0)
    effective = vector(query, channel, inside, WEIGHT_STRIDE[0])
    if norm_weight is not None:
        effective *= vector(norm_weight, channel, inside, WEIGHT_STRIDE[1])
    if out_norm_weight is not None:
        norm = vector(out_norm_weight, channel, inside, WEIGHT_STRIDE[2])
    lane = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LANES)), 0)
    lane = meet_cluster(lane + gl.expand_dims(gl.arange(0, PARTS, layout=gl.SliceLayout(1, LANES)), 1) * 0)
    values = rows.to(gl.float32)
    scaled = values * gl.expand_dims(effective, 1)
    if PAIR:
        # |a x + b y|^2 = a^2 x.x + b^2 y.y + 2ab x.y: the norm of the mixture is known from the same exchange.
        cross = gl.expand_dims(gl.reduce(values, 1, multiply), 1) + values * 0
        square, dot, cross = gl.reduce((values * values, scaled, cross), 2, add_triples)
        cross = gl.convert_layout(cross, LANES)
        square, dot = gl.convert_layout(square, LANES), gl.convert_layout(dot, LANES)
        square, dot, cross = three_over_cluster(square, dot, cross, lane, EXCHANGE)
    else:
        square, dot = gl.reduce((values * values, scaled), 2, add_pairs)
        square, dot = over_cluster(gl.convert_layout(square, LANES), gl.convert_layout(dot, LANES), lane, EXCHANGE)
    logit = dot * gl.rsqrt(square / D + EPS)
    logit = gl.where(lane < N, logit, float("-inf"))
    logit = gl.convert_layout(logit, PART_ROWS)
    highest = gl.expand_dims(gl.max(logit, 1), 1)
    weight = gl.exp(logit - highest)
    weight = weight / gl.expand_dims(gl.sum(weight, 1), 1)
    mixed = gl.sum(gl.expand_dims(weight, 2) * values, 1)
    if out_norm_weight is not None:
        if PAIR:
            square, cross = gl.convert_layout(square, PART_ROWS), gl.convert_layout(cross, PART_ROWS)
            total = gl.maximum(gl.sum(weight * weight * square + weight * (1 - weight) * cross, 1), 0.0)
            total = gl.convert_layout(total, gl.SliceLayout(1, PART_COLUMNS))
        else:
            total = gl.sum(mixed * mixed, 1)
            first = gl.arange(0, PARTS, layout=gl.SliceLayout(1, PART_COLUMNS)) * 0
            total, _ = over_cluster(total, total, first, EXCHANGE)
        mixed = mixed * gl.expand_dims(gl.rsqrt(total / D + OUT_EPS), 1) * norm
    gl.store(out + token * D + channel, mixed.to(out.dtype.element_ty), mask=inside)


def launch(sources, query, norm_weight=None, out_norm_weight=None, *, memory=torch):
    """The operator's tensors in schema order -> out, in the shape and type of the sources."""
    out = memory.empty(CONSTANTS["out"], dtype=sources[0].dtype, device=sources[0].device)
    mix_cluster[CONSTANTS["grid"]](
        *sources, *[None] * (9 - len(sources)), query, norm_weight, out_norm_weight, out,
        **CONSTANTS["mix_cluster"], **CONSTANTS["options"],
    )  # fmt: skip
    return out
