"""``kda_decode_logged``: one token of ``kda_decode`` whose state is written with every L-th token only.

Formulas, operands and result are those of ``kda_decode``, for one token a sequence without ``slots`` and
``gate_weight``. But ``state`` lies ``filled`` tokens behind (fewer than L), and what those add to it is in the records:

    S <- decays[t][:, None] * S;  S <- S + keys[t] deltas[t]^T      for t = 0 .. filled - 1, one after the other

gives the state that the token steps from. What the token itself adds becomes record number ``filled``; the L-th token
makes no record, but writes the state. The convolution's state moves on with every token. ``filled`` is not changed: it
is the same for all layers of a step, behind which it goes on by one, from L - 1 to 0.

Shapes: ``qkv`` [B, 1, 2*H*K + H*V]; ``conv_weight`` [C, W] or [C, 1, W]; ``conv_state`` [B, C, N], mutated; ``gate``
[B, 1, H*K] or [B, 1, H, K]; ``dt_bias`` with H*K elements; ``a_log`` with H elements; ``beta`` [B, 1, H]; ``state``
[B, H, K, V] (``state_layout`` "kv") or [B, H, V, K] ("vk"), mutated; ``out_gate`` [B, 1, H, V] or [B, 1, H*V];
``norm_weight`` [V]. Attributes ``scale``, ``l2_eps``, ``lower_bound``, ``norm_eps`` as there. The log, contiguous and
mutated: ``keys`` and ``decays`` fp32 [B, L, H, K], ``deltas`` fp32 [B, L, H, V]; ``filled`` integer [B].
Returns [B, 1, H, V] in the type of ``qkv``.

Source: buffered output-only decoding of public engines, with corrected deltas and a forward fold, which makes states
those of ``kda_decode`` to the bit. Errors: none at run time; the fake implementation raises ValueError for shapes that
do not fit and an unknown layout.
"""

import torch

from kimigraph.ir.operators import kda_decode
from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check, check_integer
from kimigraph.ir.reference.kda_decode_logged import kda_decode_logged

_NAME = "kda_decode_logged"


def _fake(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    decays: torch.Tensor,
    deltas: torch.Tensor,
    filled: torch.Tensor,
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
    check_integer(_NAME, filled=filled)
    sizes = check(
        _NAME,
        qkv=(qkv, "B S C"),
        state=(state, "B H K V" if state_layout == "kv" else "B H V K"),
        keys=(keys, "B L H K"),
        decays=(decays, "B L H K"),
        deltas=(deltas, "B L H V"),
        filled=(filled, "B"),
    )
    if sizes["S"] != 1:
        raise ValueError(f"{_NAME}: qkv has {sizes['S']} tokens a sequence, a step that is logged has one")
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
    keys: torch.Tensor,
    decays: torch.Tensor,
    deltas: torch.Tensor,
    filled: torch.Tensor,
    out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    **attributes: object,
) -> Cost:
    """The mean over L steps: records read and written, the state written once, three operations a record more."""
    alone = kda_decode.cost(qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight)
    tokens = keys.shape[1]
    record = nbytes(keys, decays, deltas) // tokens
    read, written = record * (tokens - 1) // 2, record * (tokens - 1) // tokens
    spared = nbytes(state) * (tokens - 1) // tokens
    folded = 3 * state.numel() * (tokens - 1) // 2
    return Cost(alone.bytes - spared + read + written + nbytes(filled), alone.flops + folded)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor qkv, Tensor conv_weight, Tensor(a!) conv_state, Tensor gate, Tensor dt_bias, Tensor a_log,"
            " Tensor beta, Tensor(b!) state, Tensor(c!) keys, Tensor(d!) decays, Tensor(e!) deltas, Tensor filled,"
            " Tensor? out_gate=None, Tensor? norm_weight=None, *, float scale, float l2_eps=1e-6,"
            ' float? lower_bound=None, float norm_eps=1e-5, str state_layout="kv") -> Tensor'
        ),
        summary="one KDA step whose state is written with every L-th token only",
        documentation=__doc__,
        reference=kda_decode_logged,
        fake=_fake,
        cost=_cost,
    )
)
