# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""All of a chunk of KDA that does not depend on the state before it, one program a (chunk of 32 tokens, head).

With G the sum of log-decays from the chunk's start to a row (included) and T that of the whole chunk,

    M_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc)  (j < i),      P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)  (j <= i)
    A = (1 + M)^-1 diag(beta),   F = k exp(G),   R = q exp(G),   B = A^T (k exp(T - G)),   Q = P A

the state S [K, V] then passes the chunk by X = v - F S, what each token's value differs from what the chunk's first
state recalls for it: O = R S + Q X and S <- exp(T) S + B^T X. The corrected deltas are u = A X.

Values never meet A in 16 bits before a subtraction: where keys repeat, rows of A sum to nearly nothing.
"""

import triton
import triton.language as tl

from kimigraph.codegen.templates.kda_gate import log_decay, sigmoid
from kimigraph.codegen.templates.rounding import narrow, product


@triton.jit
def first_slot(start, sequence, C: tl.constexpr):
    """Where the chunks of a packed sequence begin.

    start / C grows from one sequence to the next by at least its number of chunks, less one.
    """
    return start // C + sequence


@triton.jit
def chunk_rows(
    cu_seqlens, slot, entry, T: tl.constexpr, CHUNKS: tl.constexpr, SEQUENCES: tl.constexpr, C: tl.constexpr
):
    """(row of the first token among its sequence's tensor rows, tokens in the chunk, batch index) of a chunk slot.

    Packed sequence n owns the slots from ``first_slot`` on, as many as it has chunks: slots never overlap, and no table
    of chunks has to be made. Slots between sequences hold no token. ``entry`` numbers the sequences.
    """
    if cu_seqlens is None:
        sequence = slot // CHUNKS
        first = (slot % CHUNKS) * C
        count = tl.where(sequence < SEQUENCES, tl.minimum(T - first, C), 0)
    else:
        # Both loads are under way at once. Entries past the last are no sequence.
        start = tl.load(cu_seqlens + entry, mask=entry < SEQUENCES, other=0).to(tl.int32)
        stop = tl.load(cu_seqlens + entry + 1, mask=entry < SEQUENCES, other=0).to(tl.int32)
        # Slots of sequences grow strictly, so the owner is the last that begins no later.
        owner = tl.sum(((first_slot(start, entry, C) <= slot) & (entry < SEQUENCES)).to(tl.int32), 0) - 1
        begin = tl.sum(tl.where(entry == owner, start, 0), 0)
        end = tl.sum(tl.where(entry == owner, stop, 0), 0)
        first = begin + (slot - first_slot(begin, owner, C)) * C
        count = tl.minimum(end - first, C)
        sequence = owner * 0
    return first, count, sequence


@triton.jit
def load_rows(tensor, sequence, first, head, row, column, mask, STRIDE: tl.constexpr):
    """[rows, columns] of a [B, T, H, D] tensor from token ``first`` on; only the base needs 64 bits."""
    base = sequence.to(tl.int64) * STRIDE[0] + first.to(tl.int64) * STRIDE[1] + head * STRIDE[2]
    return tl.load(tensor + base + (row[:, None] * STRIDE[1] + column[None, :] * STRIDE[3]), mask=mask, other=0.0)


@triton.jit
def bounded_factors(g, k, q, C: tl.constexpr, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """Products and decays of a chunk whose decay is bounded: half of it either way stays inside fp32's exponents.

    ``g`` is in base 2. Returns (k . k and q . k decayed, k exp(G), q exp(G), k exp(T - G), exp(T)).
    """
    total = tl.sum(g, 0)
    middle = 0.5 * total
    since = tl.cumsum(g, 0) - middle[None, :]
    ahead = tl.exp2(since)
    behind = k * tl.exp2(-since)
    half = tl.exp2(middle)[None, :]
    writing = behind * half
    keys = tl.trans(behind.to(OPERAND))
    reading = q * ahead
    pairs_q = product(reading, keys, OPERAND, INTERPRET)
    weighted = k * ahead
    pairs_k = product(weighted, keys, OPERAND, INTERPRET)
    return pairs_k, pairs_q, weighted * half, reading * half, writing, tl.exp2(total)


@triton.jit
def partner_sums(g, HALF: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """[C, K]: for each row, the sum of ``g`` over the block of ``HALF`` rows that its own block is paired with."""
    PAIRS: tl.constexpr = C // (2 * HALF)
    sums = tl.sum(tl.reshape(g, [PAIRS, 2, HALF, K]), 2)
    late = tl.arange(0, 2)[None, :, None] == 1
    earlier = tl.sum(tl.where(late, 0.0, sums), 1, keep_dims=True)
    later = tl.sum(tl.where(late, sums, 0.0), 1, keep_dims=True)
    partner = tl.where(late, earlier, later)
    return tl.reshape(tl.broadcast_to(partner[:, :, None, :], [PAIRS, 2, HALF, K]), [C, K])


@triton.jit
def unbounded_factors(g, k, q, C: tl.constexpr, K: tl.constexpr, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """The same for any decay: every exponent is a sum of log-decays, so no factor exceeds one.

    Blocks of rows are paired, from single rows up to the chunk's halves: a pair of rows (i in the later block, j in the
    earlier one) decays from j to the edge between the blocks and from there to i.
    """
    row = tl.arange(0, C)
    i, j = row[:, None], row[None, :]
    pairs_q = tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
    pairs_k = tl.zeros([C, C], tl.float32)
    since = g  # from the start of the row's block to the row, included
    until = tl.zeros([C, K], tl.float32)  # from the row, excluded, to the end of its block
    for level in tl.static_range(5):
        late = ((row >> level) % 2 == 1)[:, None]
        decay = tl.exp2(tl.where(late, since, until))
        keys = k * decay
        turned = tl.trans(keys.to(OPERAND))
        pair = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        pairs_k += tl.where(pair, product(keys, turned, OPERAND, INTERPRET), 0.0)
        pairs_q += tl.where(pair, product(q * decay, turned, OPERAND, INTERPRET), 0.0)
        partner = partner_sums(g, 1 << level, C, K)
        since = since + tl.where(late, partner, 0.0)
        until = until + tl.where(late, 0.0, partner)
    ahead = tl.exp2(since)
    return pairs_k, pairs_q, k * ahead, q * ahead, k * tl.exp2(until), tl.exp2(tl.sum(g, 0))


@triton.jit
def inverse_of_unit_lower(strict, C: tl.constexpr, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """(1 + strict)^-1 of a strictly lower triangle [C, C]: blocks of rows twice as large each time, as in substitution.

    The block below the diagonal of [[X1, 0], [L, X2]]^-1 is -X2^-1 L X1^-1, with both inverses already there.
    """
    row = tl.arange(0, C)
    i, j = row[:, None], row[None, :]
    inverse = tl.where(i == j, 1.0, tl.where((i // 2 == j // 2) & (i > j), -strict, 0.0))
    for level in tl.static_range(1, 5):
        pair = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        left = product(inverse, tl.where(pair, strict, 0.0), OPERAND, INTERPRET)
        inverse = inverse - product(left, inverse, OPERAND, INTERPRET)
    return inverse


@triton.jit
def prepare_chunks(
    q,
    k,
    g,
    beta,
    a_log,
    dt_bias,
    cu_seqlens,
    reads,
    writes,
    pairs,
    decays,
    T: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SCALE: tl.constexpr,
    L2_NORM: tl.constexpr,
    L2_EPS: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    BOUNDED: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    G_STRIDE: tl.constexpr,
    BETA_STRIDE: tl.constexpr,
    RATE_STRIDE: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DELTAS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Scratch, indexed [slot, head]: reads = F over R [2 C, K], writes = B^T [K, C] and pairs = Q [C, C] (A over Q with
    ``DELTAS``) in one type, decays = exp(T) [K] in fp32."""
    OPERAND: tl.constexpr = writes.dtype.element_ty
    # Entries of the inverse are about one at most, as are unit keys: fp16 has three bits more than bf16.
    SOLVE: tl.constexpr = tl.float16 if L2_NORM and OPERAND == tl.bfloat16 else OPERAND
    head = tl.program_id(0)
    slot = tl.program_id(1)
    first, count, sequence = chunk_rows(cu_seqlens, slot, tl.arange(0, BLOCK_N), T, CHUNKS, SEQUENCES, C)
    if count > 0:
        row = tl.arange(0, C)
        in_k = tl.arange(0, BLOCK_K)
        inside = row < count
        key_mask = inside[:, None] & (in_k < K)[None, :]
        query = load_rows(q, sequence, first, head, row, in_k, key_mask, Q_STRIDE).to(tl.float32)
        key = load_rows(k, sequence, first, head, row, in_k, key_mask, K_STRIDE).to(tl.float32)
        gate = load_rows(g, sequence, first, head, row, in_k, key_mask, G_STRIDE).to(tl.float32)
        place = beta + sequence.to(tl.int64) * BETA_STRIDE[0] + first.to(tl.int64) * BETA_STRIDE[1]
        place = place + head * BETA_STRIDE[2] + row * BETA_STRIDE[1]
        strength = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        if a_log is not None:
            rate = tl.exp(tl.load(a_log + head * RATE_STRIDE).to(tl.float32))
            place = dt_bias + head * BIAS_STRIDE[0] + in_k * BIAS_STRIDE[1]
            bias = tl.load(place, mask=in_k < K, other=0.0).to(tl.float32)
            gate = log_decay(gate + bias[None, :], rate, LOWER_BOUND)
            gate = tl.where(key_mask, gate, 0.0)
            strength = tl.where(inside, sigmoid(strength), 0.0)
        if L2_NORM:
            key = key * tl.rsqrt(tl.sum(key * key, 1) + L2_EPS)[:, None]
            query = query * (tl.rsqrt(tl.sum(query * query, 1) + L2_EPS) * SCALE)[:, None]
        else:
            query = query * SCALE
        gate = gate * 1.4426950408889634
        if BOUNDED:
            pairs_k, pairs_q, erased, read, written, decay = bounded_factors(gate, key, query, C, OPERAND, INTERPRET)
        else:
            pairs_k, pairs_q, erased, read, written, decay = unbounded_factors(
                gate, key, query, C, BLOCK_K, OPERAND, INTERPRET
            )
        base = (slot * H + head).to(tl.int64)
        tile = row[:, None] * BLOCK_K + in_k[None, :]
        tl.store(decays + base * BLOCK_K + in_k, decay)
        tl.store(reads + base * (2 * C * BLOCK_K) + tile, narrow(erased, reads, INTERPRET))
        tl.store(reads + base * (2 * C * BLOCK_K) + C * BLOCK_K + tile, narrow(read, reads, INTERPRET))
        i, j = row[:, None], row[None, :]
        strict = tl.where(j < i, pairs_k * strength[:, None], 0.0)
        solved = inverse_of_unit_lower(strict, C, SOLVE, INTERPRET) * strength[None, :]
        square = i * C + j
        if DELTAS:
            tl.store(pairs + base * (2 * C * C) + square, narrow(solved, pairs, INTERPRET))
            square += base * (2 * C * C) + C * C
        else:
            square += base * (C * C)
        pairs_q = product(tl.where(j <= i, pairs_q, 0.0), solved, SOLVE, INTERPRET)
        tl.store(pairs + square, narrow(pairs_q, pairs, INTERPRET))
        turned = product(tl.trans(written), solved, SOLVE, INTERPRET)
        place = writes + base * (C * BLOCK_K) + in_k[:, None] * C + row[None, :]
        tl.store(place, narrow(turned, writes, INTERPRET))
