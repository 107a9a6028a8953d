"""The functions of Kimi Delta Attention that hold no parameters: short convolution, gate, delta rule.

A state is [B, H, V, K], fp32. Per token, with log-decay g and strength beta,

    S <- S * exp(g)[None, :];  u = beta * (v - S k);  S <- S + u k^T;  o = S q / sqrt(K)

Source: the Kimi Linear technical report (the chunk form, equations of the UT transform) and Kimi K3's (bounded gate).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

L2_NORM_EPS = 1e-6
SUB_CHUNK = 16
SUB_CHUNKS = 4


def l2_norm(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + eps)`` over the last dim: eps is added to the sum."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def log_decay(logits: Tensor, a_log: Tensor, lower_bound: float | None) -> Tensor:
    """The log-decay g < 0 of gate logits [B, S, H, K] (bias included) and ``a_log`` [H], all fp32.

    ``lower_bound * sigmoid(exp(a_log) * logits)``, or, without a bound, ``-exp(a_log) * softplus(logits)``.
    """
    rate = a_log.exp().unsqueeze(-1)
    if lower_bound is None:
        return -rate * F.softplus(logits)
    return lower_bound * torch.sigmoid(rate * logits)


def short_convolution(x: Tensor, weight: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution and SiLU over ``x`` [B, S, C], continuing from the inputs in ``initial_state``.

    ``weight`` [C, 1, W]; ``initial_state`` [B, C, W - 1] holds the last raw inputs, newest last. Computes in the type
    of ``weight``. Returns [B, S, C] in the type of ``x`` and the final state; ``initial_state`` is left alone.
    """
    window = torch.cat([initial_state, x.transpose(1, 2).to(initial_state.dtype)], dim=-1)
    mixed = F.silu(F.conv1d(window.to(weight.dtype), weight, groups=weight.shape[0]))
    return mixed.transpose(1, 2).to(x.dtype), window[..., x.shape[1] :]


def kimi_delta_attention_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token. ``q``, ``k``, ``g`` [B, H, K], ``v`` [B, H, V], ``beta`` [B, H, 1], fp32; ``state`` [B, H, V, K].

    Normalises q and k. Returns the read-out [B, H, V] and the new state; the given one is left alone.
    """
    q = l2_norm(q) * q.shape[-1] ** -0.5
    k = l2_norm(k)
    state = state * g.exp().unsqueeze(-2)
    delta = (v - (state * k.unsqueeze(-2)).sum(-1)) * beta
    state = state + delta.unsqueeze(-1) * k.unsqueeze(-2)
    return (state * q.unsqueeze(-2)).sum(-1), state


def chunk_kimi_delta_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Many tokens, in chunks: the same result as the step token by token.

    ``q``, ``k`` [B, S, H, K] after convolution (normalised here), ``v`` [B, S, H, V], ``g`` [B, S, H, K] log-decay,
    ``beta`` [B, S, H] after its sigmoid, ``initial_state`` [B, H, V, K]. Computes in fp32 (fp64 operands: fp64).
    Returns the read-outs [B, S, H, V] in the type of ``v`` and the final state; ``initial_state`` is left alone.

    Exponents are differences of cumulated gates that are never positive, so gates of any strength are safe.
    """
    tokens, value_dim, dtype = q.shape[1], v.shape[-1], v.dtype
    size = min(SUB_CHUNK * SUB_CHUNKS, -(-tokens // SUB_CHUNK) * SUB_CHUNK)
    q, k, v, g, beta = (_chunks(x, size) for x in (q, k, v, g, beta.unsqueeze(-1)))
    q, k = l2_norm(q) * q.shape[-1] ** -0.5, l2_norm(k)
    total = g.cumsum(-2)

    pairs_kk, pairs_qk = decayed_products(k, q, g)
    system = torch.eye(size, dtype=q.dtype, device=q.device) + (beta * pairs_kk).tril(-1)
    solved = torch.linalg.solve_triangular(
        system, torch.cat([beta * v, beta * k * total.exp()], dim=-1), upper=False, unitriangular=True
    )
    values, reads = solved.split([value_dim, k.shape[-1]], dim=-1)

    last = total[..., -1:, :]
    reading, writing, carry = q * total.exp(), k * (last - total).exp(), last.exp()
    state = initial_state.to(q.dtype)
    outputs: list[Tensor] = []
    for chunk in range(q.shape[2]):
        update = values[:, :, chunk] - reads[:, :, chunk] @ state.transpose(-1, -2)
        outputs.append(reading[:, :, chunk] @ state.transpose(-1, -2) + pairs_qk[:, :, chunk] @ update)
        state = state * carry[:, :, chunk] + update.transpose(-1, -2) @ writing[:, :, chunk]
    read_out = torch.cat(outputs, dim=2).transpose(1, 2)
    return read_out[:, :tokens].to(dtype), state


def decayed_products(k: Tensor, q: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """``sum_c x[i, c] k[j, c] exp(g[j + 1, c] + .. + g[i, c])`` for x = k and x = q, zero where j > i.

    All [B, H, N, C, K], C a multiple of SUB_CHUNK; returns two [B, H, N, C, C]. Pairs inside a sub-chunk take their
    decay one by one, from sums of its own gates, which round less than sums from the chunk's start. A row reaches
    earlier sub-chunks through the start of its own, so that both factors of the decay are at most one.
    """
    size, total = k.shape[-2], g.cumsum(-2)
    below = torch.ones(SUB_CHUNK, SUB_CHUNK, dtype=torch.bool, device=k.device).tril().unsqueeze(-1)
    rows_k: list[Tensor] = []
    rows_q: list[Tensor] = []
    for start in range(0, size, SUB_CHUNK):
        here = slice(start, start + SUB_CHUNK)
        gates, keys = g[..., here, :].cumsum(-2), k[..., here, :]
        apart = gates.unsqueeze(-2) - gates.unsqueeze(-3)
        near = (keys.unsqueeze(-3) * apart.masked_fill(~below, float("-inf")).exp()).transpose(-1, -2)
        reached = (total[..., start - 1 : start, :] - total[..., :start, :]) if start else total[..., :0, :]
        far = (k[..., :start, :] * reached.exp()).transpose(-1, -2)
        for rows, x in ((rows_k, keys), (rows_q, q[..., here, :])):
            inside = (x.unsqueeze(-2) @ near).squeeze(-2)
            outside = (x * gates.exp()) @ far
            rows.append(F.pad(torch.cat([outside, inside], dim=-1), (0, size - start - SUB_CHUNK)))
    return torch.cat(rows_k, dim=-2), torch.cat(rows_q, dim=-2)


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, S, H, D] as [B, H, N, size, D] in the computing type; padding tokens are zero and change nothing."""
    x = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(1, 2)
    x = F.pad(x, (0, 0, 0, -x.shape[2] % size))
    return x.unflatten(2, (-1, size))
