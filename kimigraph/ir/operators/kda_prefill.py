"""``kda_prefill``: the gated delta rule over a run of tokens, gates already computed.

    q, k <- x * rsqrt(sum(x^2) + l2_eps) if l2_norm;  q <- scale * q
    S <- exp(g)[:, None] * S;  u = beta * (v - S^T k);  S <- S + k u^T;  o = S^T q          (token by token)

Shapes: ``q``, ``k`` [B, T, H, K]; ``v`` [B, T, H, V]; ``g`` [B, T, H, K], log-decay, natural logarithm, <= 0; ``beta``
[B, T, H], after its sigmoid; ``initial_state`` [B, H, K, V] (``state_layout`` "kv") or [B, H, V, K] ("vk"), zeros when
None, never written. Arithmetic in fp32.

Returns ``out`` [B, T, H, V] in the type of ``v`` and ``final_state`` fp32 in ``state_layout``; T = 0 gives an empty
``out`` and the initial state.

Source: Kimi Linear technical report. Errors: none at run time; the fake implementation raises ValueError for shapes
that do not fit and an unknown layout.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check, check_layout
from kimigraph.ir.reference.kda_prefill import kda_prefill

_NAME = "kda_prefill"


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    scale: float,
    l2_norm: bool,
    l2_eps: float = 1e-6,
    state_layout: str = "kv",
) -> tuple[torch.Tensor, torch.Tensor]:
    check_layout(_NAME, state_layout)
    state_shape = "B H K V" if state_layout == "kv" else "B H V K"
    sizes = check(
        _NAME,
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T H V"),
        g=(g, "B T H K"),
        beta=(beta, "B T H"),
        initial_state=(initial_state, state_shape),
    )
    final = [sizes[letter] for letter in state_shape.split()]
    return v.new_empty(v.shape), v.new_empty(final, dtype=torch.float32)


def _cost(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    **attributes: object,
) -> Cost:
    batch, tokens, heads, key_dim = q.shape
    state = batch * heads * key_dim * v.shape[-1]
    return Cost(bytes=nbytes(q, k, v, g, beta, initial_state, v) + 4 * state, flops=7 * state * tokens)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None, *, float scale,"
            ' bool l2_norm, float l2_eps=1e-6, str state_layout="kv") -> (Tensor, Tensor)'
        ),
        summary="the gated delta rule over a run of tokens",
        documentation=__doc__,
        reference=kda_prefill,
        fake=_fake,
        cost=_cost,
    )
)
