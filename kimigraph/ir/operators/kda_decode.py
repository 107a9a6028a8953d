"""``kda_decode``: one KDA step (or a few tokens a row) with its neighbours, states updated in place.

Per token and head: depthwise causal convolution of width W over the raw projections, SiLU; q and k L2-normalised
(x * rsqrt(sum(x^2) + l2_eps)), q times ``scale``; with z = gate + dt_bias and rate = exp(a_log),

    g = -rate * softplus(z)                       (lower_bound None)
    g = lower_bound * sigmoid(rate * z)           (otherwise)
    S <- exp(g)[:, None] * S;  u = sigmoid(beta) * (v - S^T k);  S <- S + k u^T;  o = S^T q
    out = RMSNorm(o) * norm_weight * sigmoid(out_gate)     (each factor only if its operand is given)

Shapes: ``qkv`` [B, S, 2*H*K + H*V], channels q | k | v, heads major; ``conv_weight`` [C, W] or [C, 1, W];
``conv_state`` [B, C, N], N >= W - 1, the last N raw inputs, newest last, mutated; ``gate`` raw logits [B, S, H*K] or
[B, S, H, K]; ``dt_bias`` [H*K]; ``a_log`` with H elements; ``beta`` raw logits [B, S, H]; ``state`` [B, H, K, V]
(``state_layout`` "kv") or [B, H, V, K] ("vk"), fp32 by default, mutated; ``out_gate`` [B, S, H, V] or [B, S, H*V];
``norm_weight`` [V]. Arithmetic in fp32. Returns [B, S, H, V] in the type of ``qkv``.

Source: Kimi Linear and Kimi K3 technical reports. Errors: shapes are checked by the fake implementation.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.reference.kda_decode import kda_decode


def _value_dim(qkv, gate, a_log):
    heads = a_log.numel()
    key_dim = gate.shape[-1] // heads if gate.dim() == 3 else gate.shape[-1]
    return heads, qkv.shape[-1] // heads - 2 * key_dim


def _fake(qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate=None, norm_weight=None, *, scale, l2_eps=1e-6, lower_bound=None, norm_eps=1e-5, state_layout="kv"):
    torch._check(state_layout in ("kv", "vk"), lambda: f"kda_decode: state_layout {state_layout!r}, want 'kv' or 'vk'")
    torch._check(conv_state.shape[-1] >= conv_weight.shape[-1] - 1, lambda: f"kda_decode: conv_state holds {conv_state.shape[-1]} inputs, a convolution of width {conv_weight.shape[-1]} needs {conv_weight.shape[-1] - 1}")
    heads, value_dim = _value_dim(qkv, gate, a_log)
    return qkv.new_empty((qkv.shape[0], qkv.shape[1], heads, value_dim))


def _cost(qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate=None, norm_weight=None, **_):
    heads, value_dim = _value_dim(qkv, gate, a_log)
    out = qkv.shape[0] * qkv.shape[1] * heads * value_dim * qkv.element_size()
    read = nbytes(qkv, conv_weight, gate, dt_bias, a_log, beta, out_gate, norm_weight)
    return Cost(bytes=2 * nbytes(state, conv_state) + read + out, flops=7 * state.numel() * qkv.shape[1])


OPERATOR = register(
    Operator(
        name="kda_decode",
        signature=(
            "(Tensor qkv, Tensor conv_weight, Tensor(a!) conv_state, Tensor gate, Tensor dt_bias, Tensor a_log, Tensor beta,"
            " Tensor(b!) state, Tensor? out_gate=None, Tensor? norm_weight=None, *, float scale, float l2_eps=1e-6,"
            ' float? lower_bound=None, float norm_eps=1e-5, str state_layout="kv") -> Tensor'
        ),
        summary="one KDA step: convolution, gates, delta rule, read-out, gated norm",
        reference=kda_decode,
        fake=_fake,
        cost=_cost,
    )
)
