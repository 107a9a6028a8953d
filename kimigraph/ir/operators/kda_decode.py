"""``kda_decode``: one KDA step (or a few tokens a row) with its neighbours, states updated in place.

Per token and head: depthwise causal convolution of width W over the raw projections, SiLU; q and k L2-normalised
(x * rsqrt(sum(x^2) + l2_eps)), q times ``scale``; with z = gate + dt_bias and rate = exp(a_log),

    g = -rate * softplus(z)                       (lower_bound None)
    g = lower_bound * sigmoid(rate * z)           (otherwise)
    S <- exp(g)[:, None] * S;  u = sigmoid(beta) * (v - S^T k);  S <- S + k u^T;  o = S^T q
    out = o * rsqrt(mean(o^2) + norm_eps) * norm_weight    (only with norm_weight)
    out = out * sigmoid(out_gate)                          (only with out_gate)

Shapes: ``qkv`` [B, S, 2*H*K + H*V], channels q | k | v, heads major; ``conv_weight`` [C, W] or [C, 1, W];
``conv_state`` [B, C, N], N >= W - 1, the last N raw inputs, newest last, mutated; ``gate`` raw logits [B, S, H*K] or
[B, S, H, K]; ``dt_bias`` with H*K elements; ``a_log`` with H elements; ``beta`` raw logits [B, S, H]; ``state``
[B, H, K, V] (``state_layout`` "kv") or [B, H, V, K] ("vk"), fp32 by default, mutated; ``out_gate`` [B, S, H, V] or
[B, S, H*V]; ``norm_weight`` [V]. Arithmetic in fp32. Returns [B, S, H, V] in the type of ``qkv``.

With ``gate_weight`` [H*K, R] the gate's logits are its product with ``gate`` [B, S, R], in fp32.

With ``slots`` (int32 or int64 [B]) the states are a pool, ``conv_state`` [P, C, N] and ``state`` [P, ...]: row b has
the entry slots[b], and no two rows the same one. An entry below 1 is the null slot of a padded row: its output is zero,
and no state of it is read or written.

Source: Kimi Linear and Kimi K3 technical reports. Errors: none at run time; the fake implementation raises ValueError
for shapes that do not fit and an unknown layout.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check, check_integer, check_layout
from kimigraph.ir.reference.kda_decode import kda_decode

_NAME = "kda_decode"


def _dims(
    qkv: torch.Tensor, gate: torch.Tensor, a_log: torch.Tensor, gate_weight: torch.Tensor | None
) -> tuple[int, int, int]:
    """Heads, key dim and value dim."""
    heads = a_log.numel()
    channels = gate.shape[-1] if gate_weight is None else gate_weight.shape[0]
    key_dim = channels // heads if gate.dim() == 3 else channels
    return heads, key_dim, qkv.shape[-1] // heads - 2 * key_dim


def fake(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    gate_weight: torch.Tensor | None = None,
    *,
    scale: float,
    l2_eps: float = 1e-6,
    lower_bound: float | None = None,
    norm_eps: float = 1e-5,
    state_layout: str = "kv",
) -> torch.Tensor:
    """The output's shape; ValueError for operands that do not fit."""
    check_layout(_NAME, state_layout)
    check_integer(_NAME, slots=slots)
    rows = "B" if slots is None else "P"
    sizes = check(
        _NAME,
        qkv=(qkv, "B S C"),
        conv_weight=(conv_weight, "C one W" if conv_weight.dim() == 3 else "C W"),
        conv_state=(conv_state, f"{rows} C N"),
        beta=(beta, "B S H"),
        gate=(gate, "B S R" if gate_weight is not None else "B S H K" if gate.dim() == 4 else "B S HK"),
        gate_weight=(gate_weight, "HK R"),
        state=(state, f"{rows} H K V" if state_layout == "kv" else f"{rows} H V K"),
        slots=(slots, "B"),
        norm_weight=(norm_weight, "V"),
        out_gate=(out_gate, "B S H V" if out_gate is not None and out_gate.dim() == 4 else "B S HV"),
    )
    heads, key_dim, value_dim = sizes["H"], sizes["K"], sizes["V"]
    if a_log.numel() != heads or dt_bias.numel() != heads * key_dim:
        raise ValueError(
            f"{_NAME}: a_log has {a_log.numel()} elements and dt_bias {dt_bias.numel()}, want H = {heads} and H*K ="
            f" {heads * key_dim}"
        )
    if (
        sizes["C"] != heads * (2 * key_dim + value_dim)
        or sizes.get("HK", heads * key_dim) != heads * key_dim
        or sizes.get("HV", heads * value_dim) != heads * value_dim
    ):
        raise ValueError(
            f"{_NAME}: qkv has {sizes['C']} channels, gate is {list(gate.shape)}; want 2*H*K + H*V and H*K with H ="
            f" {heads}, K = {key_dim}, V = {value_dim}"
        )
    if sizes["N"] < sizes["W"] - 1:
        raise ValueError(
            f"{_NAME}: conv_state holds {sizes['N']} inputs, a width of {sizes['W']} needs one less than it"
        )
    return qkv.new_empty((sizes["B"], sizes["S"], heads, value_dim))


def cost(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    gate_weight: torch.Tensor | None = None,
    **attributes: object,
) -> Cost:
    """Operands and output once, states twice; seven operations a state element and token."""
    heads, key_dim, value_dim = _dims(qkv, gate, a_log, gate_weight)
    batch, tokens = qkv.shape[:2]
    out = batch * tokens * heads * value_dim * qkv.element_size()
    read = nbytes(qkv, conv_weight, gate, dt_bias, a_log, beta, out_gate, norm_weight, slots, gate_weight)
    product = 0 if gate_weight is None else 2 * batch * tokens * heads * key_dim * gate.shape[-1]
    convolution = 2 * batch * tokens * conv_weight.numel()
    # Of a pool only the entries of the rows move.
    moved = 2 * batch * (state[0].numel() * state.element_size() + conv_state[0].numel() * conv_state.element_size())
    return Cost(bytes=moved + read + out, flops=7 * batch * state[0].numel() * tokens + convolution + product)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor qkv, Tensor conv_weight, Tensor(a!) conv_state, Tensor gate, Tensor dt_bias, Tensor a_log,"
            " Tensor beta, Tensor(b!) state, Tensor? out_gate=None, Tensor? norm_weight=None, Tensor? slots=None,"
            " Tensor? gate_weight=None, *, float scale, float l2_eps=1e-6, float? lower_bound=None,"
            ' float norm_eps=1e-5, str state_layout="kv") -> Tensor'
        ),
        summary="one KDA step: convolution, gates, delta rule, read-out, gated norm",
        documentation=__doc__,
        reference=kda_decode,
        fake=fake,
        cost=cost,
    )
)
