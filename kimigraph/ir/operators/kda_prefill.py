"""``kda_prefill``: the gated delta rule over runs of tokens.

    q, k <- x * rsqrt(sum(x^2) + l2_eps) if l2_norm;  q <- scale * q
    S <- exp(g)[:, None] * S;  u = beta * (v - S^T k);  S <- S + k u^T;  o = S^T q          (token by token)

Shapes: ``q``, ``k`` [B, T, H, K]; ``v`` [B, T, H, V]; ``g`` [B, T, H, K], log-decay, natural logarithm, <= 0; ``beta``
[B, T, H], after its sigmoid (nothing is clamped: beyond [0, 2] the rule itself diverges); ``initial_state``
[B, H, K, V] (``state_layout`` "kv") or [B, H, V, K] ("vk"), zeros when None, never written. Arithmetic in fp32.

With ``a_log`` (H elements) and ``dt_bias`` (H*K elements), ``g`` and ``beta`` are raw logits, and the gate is that of
``kda_decode``: with z = g + dt_bias and rate = exp(a_log), -rate * softplus(z), or lower_bound * sigmoid(rate * z)
where there is a ``lower_bound``; the strength is sigmoid(beta). Without them ``lower_bound`` is a promise that no
log-decay lies below it, which a kernel may use.

With ``cu_seqlens`` (int32 or int64 [N + 1], from 0 to T, never falling), B is 1 and sequence n is the tokens from
cu_seqlens[n] up to cu_seqlens[n + 1]; states are [N, ...]. A sequence without tokens keeps its state.

Returns ``out`` [B, T, H, V] in the type of ``v`` and ``final_state`` fp32 in ``state_layout``; T = 0 gives an empty
``out`` and the initial state.

Source: Kimi Linear technical report. Errors: none at run time; the fake implementation raises ValueError for shapes
that do not fit, an unknown layout and one of ``a_log`` and ``dt_bias`` without the other.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check, check_integer, check_layout
from kimigraph.ir.reference.kda_prefill import kda_prefill

_NAME = "kda_prefill"
OPERANDS = (
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None, Tensor? a_log=None,"
    " Tensor? dt_bias=None, Tensor? cu_seqlens=None, *, float scale, bool l2_norm, float l2_eps=1e-6,"
    ' float? lower_bound=None, str state_layout="kv")'
)


def fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float,
    l2_norm: bool,
    l2_eps: float = 1e-6,
    lower_bound: float | None = None,
    state_layout: str = "kv",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs' shapes; ValueError for operands that do not fit."""
    check_layout(_NAME, state_layout)
    check_integer(_NAME, cu_seqlens=cu_seqlens)
    state_shape = "N H K V" if state_layout == "kv" else "N H V K"
    rows = state_shape if cu_seqlens is not None else state_shape.replace("N", "B")
    sizes = check(
        _NAME,
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T H V"),
        g=(g, "B T H K"),
        beta=(beta, "B T H"),
        initial_state=(initial_state, rows),
        cu_seqlens=(cu_seqlens, "E"),
    )
    sizes["N"] = sizes["B"] if cu_seqlens is None else sizes["E"] - 1
    states = sizes["N"] if initial_state is None else initial_state.shape[0]
    if cu_seqlens is not None and (sizes["B"] != 1 or states != sizes["N"]):
        raise ValueError(
            f"{_NAME}: packed sequences want B = 1 and states of {sizes['N']} sequences, got B = {sizes['B']} and"
            f" states of {states}"
        )
    if (a_log is None) != (dt_bias is None):
        raise ValueError(f"{_NAME}: a_log and dt_bias make the gate together; give both or neither")
    heads, key_dim = sizes["H"], sizes["K"]
    if a_log is not None and dt_bias is not None and (a_log.numel() != heads or dt_bias.numel() != heads * key_dim):
        raise ValueError(
            f"{_NAME}: a_log has {a_log.numel()} elements and dt_bias {dt_bias.numel()}, want H = {heads} and H*K ="
            f" {heads * key_dim}"
        )
    final = [sizes[letter] for letter in state_shape.split()]
    return v.new_empty(v.shape), v.new_empty(final, dtype=torch.float32)


def cost(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **attributes: object,
) -> Cost:
    """Operands, output and state once each; seven operations a state element and token."""
    batch, tokens, heads, key_dim = q.shape
    state = heads * key_dim * v.shape[-1]
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    read = nbytes(q, k, v, g, beta, initial_state, a_log, dt_bias, cu_seqlens)
    return Cost(bytes=read + nbytes(v) + 4 * sequences * state, flops=7 * state * batch * tokens)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=f"{OPERANDS} -> (Tensor, Tensor)",
        summary="the gated delta rule over runs of tokens",
        documentation=__doc__,
        reference=kda_prefill,
        fake=fake,
        cost=cost,
    )
)
