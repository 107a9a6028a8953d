# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""What follows the routed experts: the norm of their sum, the product out of the latent space, the shared experts."""

import triton
import triton.language as tl

from kimigraph.codegen.templates.moe_activation import gated
from kimigraph.codegen.templates.rounding import narrow, product


@triton.jit
def activate_shared(gate, linear, out, block, TOKENS: tl.constexpr, SHARED: tl.constexpr, STRIDE: tl.constexpr,
                    SITU: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr,
                    BLOCK: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """``out`` [tokens, J] = act(gate, linear), BLOCK elements a program."""
    if gate is not None:
        element = block * BLOCK + tl.arange(0, BLOCK)
        token, column = element // SHARED, element % SHARED
        mask = token < TOKENS
        opened = tl.load(gate + token * STRIDE[0] + column * STRIDE[1], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(linear + token * STRIDE[2] + column * STRIDE[3], mask=mask, other=0.0).to(tl.float32)
        hidden = gated(opened, second, SITU, BETA, LINEAR_BETA, LIMIT, INTERPRET)
        tl.store(out + element, narrow(hidden, out, INTERPRET), mask=mask)


@triton.jit
def routed_rows(routed, token, depth, TOKENS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Elements of the routed sum, parts added in order; ``token`` and ``depth`` broadcast against each other."""
    mask = (token < TOKENS) & (depth < WIDTH)
    places = routed + token * WIDTH + depth
    total = tl.load(places, mask=mask, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        total += tl.load(places + part * TOKENS * WIDTH, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def weighted(total, weight, rows, DOT: tl.constexpr, INTERPRET: tl.constexpr):
    """``total`` plus weight [TILE, STEP] times rows: [STEP, LINES] by matrix units, or [STEP, 1] in lanes."""
    if DOT:
        if INTERPRET or weight.dtype == tl.float32:
            total += product(weight, rows, weight.dtype, INTERPRET)
        else:
            total = tl.dot(weight, rows.to(weight.dtype), total)
    else:
        total += weight.to(tl.float32) * tl.trans(rows).to(tl.float32)
    return total


@triton.jit
def finish_experts(routed, norm_weight, up, shared, shared_down, residual, out, UP_STRIDE: tl.constexpr,
                   DOWN_STRIDE: tl.constexpr, NORM_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr,
                   TOKENS: tl.constexpr, WIDTH: tl.constexpr, OUTER: tl.constexpr, SHARED: tl.constexpr,
                   PARTS: tl.constexpr, EPS: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr,
                   STEP: tl.constexpr, DOT: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """TILE columns of the result of LINES tokens; a program sums the squares of its tokens' rows itself.

    The norm's root is one number a token, so it multiplies the product's result instead of its operand.
    """
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    token = tl.program_id(1) * LINES + tl.arange(0, LINES)
    inside = (column < OUTER)[:, None]
    total = tl.zeros([TILE, LINES if DOT else STEP], tl.float32)
    if up is None:
        for_all = routed_rows(routed, token[None, :], column[:, None], TOKENS, WIDTH, PARTS)
    else:
        squares = tl.zeros([LINES], tl.float32)
        for start in range(0, WIDTH, STEP):
            depth = start + tl.arange(0, STEP)
            weight = tl.load(up + column.to(tl.int64)[:, None] * UP_STRIDE[0] + depth[None, :] * UP_STRIDE[1],
                             mask=inside & (depth < WIDTH)[None, :], other=0.0)  # fmt: skip
            rows = routed_rows(routed, token[None, :], depth[:, None], TOKENS, WIDTH, PARTS)
            squares += tl.sum(rows * rows, 0)
            if norm_weight is not None:
                factor = tl.load(norm_weight + depth * NORM_STRIDE, mask=depth < WIDTH, other=0.0)
                rows *= factor.to(tl.float32)[:, None]
            total = weighted(total, weight, rows, DOT, INTERPRET)
        if norm_weight is not None:
            root = 1.0 / tl.sqrt(squares / WIDTH + EPS)
            total *= root[None, :]
    if shared is not None:
        for start in range(0, SHARED, STEP):
            depth = start + tl.arange(0, STEP)
            places = shared_down + column.to(tl.int64)[:, None] * DOWN_STRIDE[0] + depth[None, :] * DOWN_STRIDE[1]
            weight = tl.load(places, mask=inside & (depth < SHARED)[None, :], other=0.0)
            rows = tl.load(shared + token[None, :] * SHARED + depth[:, None],
                           mask=(token < TOKENS)[None, :] & (depth < SHARED)[:, None], other=0.0,
                           cache_modifier=".cg")  # fmt: skip
            total = weighted(total, weight, rows, DOT, INTERPRET)
    if not DOT:
        total = tl.sum(total, 1)[:, None]
    if up is None:
        total += for_all
    mask = inside & (token < TOKENS)[None, :]
    if residual is not None:
        places = residual + token.to(tl.int64)[None, :] * RESIDUAL_STRIDE[0] + column[:, None] * RESIDUAL_STRIDE[1]
        total += tl.load(places, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    places = out + token.to(tl.int64)[None, :] * OUTER + column[:, None]
    tl.store(places, narrow(total, out, INTERPRET), mask=mask)
