"""``kda_verify_states``: the tokens of ``kda_decode``, with the state behind each instead of a new state.

The other way to verify drafts, which ``kda_verify`` is measured against: formulas, operands and result are those of
``kda_decode``, token for token, but ``conv_state`` and ``state`` stay as they are. Written are, for every token, the
state behind it (``states``) and its raw projections (``inputs``).

Shapes: ``qkv`` [B, S, 2*H*K + H*V]; ``conv_weight`` [C, W] or [C, 1, W]; ``conv_state`` [B, C, N]; ``gate`` [B, S, H*K]
or [B, S, H, K]; ``dt_bias`` with H*K elements; ``a_log`` with H elements; ``beta`` [B, S, H]; ``state`` [B, H, K, V]
(``state_layout`` "kv") or [B, H, V, K] ("vk"); ``out_gate`` [B, S, H, V] or [B, S, H*V]; ``norm_weight`` [V];
``states`` [B, S, ..] as ``state`` and ``inputs`` [B, S, C] in the type of ``conv_state``, both contiguous and mutated.
Attributes ``scale``, ``l2_eps``, ``lower_bound``, ``norm_eps`` as there.
Returns [B, S, H, V] in the type of ``qkv``.

Source: the usual way of public engines. Errors: none at run time; the fake implementation raises ValueError for shapes
that do not fit and an unknown layout.
"""

import torch

from kimigraph.ir.operators import kda_decode
from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check
from kimigraph.ir.reference.kda_verify_states import kda_verify_states

_NAME = "kda_verify_states"


def _fake(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    states: torch.Tensor,
    inputs: torch.Tensor,
    out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    *,
    scale: float,
    l2_eps: float = 1e-6,
    lower_bound: float | None = None,
    norm_eps: float = 1e-5,
    state_layout: str = "kv",
) -> torch.Tensor:
    out = kda_decode.fake(
        qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight,
        scale=scale, l2_eps=l2_eps, lower_bound=lower_bound, norm_eps=norm_eps, state_layout=state_layout,
    )  # fmt: skip
    check(
        _NAME,
        out=(out, "B S H V"),
        qkv=(qkv, "B S C"),
        state=(state, "B H K V" if state_layout == "kv" else "B H V K"),
        states=(states, "B S H K V" if state_layout == "kv" else "B S H V K"),
        inputs=(inputs, "B S C"),
    )
    return out


def _cost(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    states: torch.Tensor,
    inputs: torch.Tensor,
    out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    **attributes: object,
) -> Cost:
    alone = kda_decode.cost(qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight)
    written = nbytes(states, inputs)
    return Cost(alone.bytes - nbytes(state, conv_state) + written, alone.flops)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor qkv, Tensor conv_weight, Tensor conv_state, Tensor gate, Tensor dt_bias, Tensor a_log,"
            " Tensor beta, Tensor state, Tensor(a!) states, Tensor(b!) inputs,"
            " Tensor? out_gate=None, Tensor? norm_weight=None, *, float scale, float l2_eps=1e-6,"
            ' float? lower_bound=None, float norm_eps=1e-5, str state_layout="kv") -> Tensor'
        ),
        summary="a few tokens of KDA, the state behind each apart",
        documentation=__doc__,
        reference=kda_verify_states,
        fake=_fake,
        cost=_cost,
    )
)
