"""``kda_replay``: fold what ``kda_verify`` recorded of the accepted tokens into the states, in place, for all layers.

For sequence p and the tokens t = 0, 1, .. accepted[p] - 1, one after the other,

    S <- decays[t][:, None] * S;  S <- S + keys[t] deltas[t]^T

which is the step of ``kda_decode``, so the state is to the bit what it would have left. The convolution's state becomes
its last N raw inputs, those of the accepted tokens behind what it held. A sequence with 0 (or less) keeps both; more
than S counts as S. The counts are read where the tensors are.

Shapes: ``state`` [L, P, H, K, V] (``state_layout`` "kv") or [L, P, H, V, K] ("vk") and ``conv_state`` [L, P, C, N],
both mutated; ``keys`` and ``decays`` [L, P, S, H, K], ``deltas`` [L, P, S, H, V], ``inputs`` [L, P, S, C];
``accepted`` integer [P]. Arithmetic in fp32. Returns nothing.

Source: state replay of public engines, the forward fold. Errors: none at run time; the fake implementation raises
ValueError for shapes that do not fit and an unknown layout.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check, check_integer, check_layout
from kimigraph.ir.reference.kda_replay import kda_replay

_NAME = "kda_replay"


def _fake(
    state: torch.Tensor,
    conv_state: torch.Tensor,
    keys: torch.Tensor,
    decays: torch.Tensor,
    deltas: torch.Tensor,
    inputs: torch.Tensor,
    accepted: torch.Tensor,
    *,
    state_layout: str = "kv",
) -> None:
    check_layout(_NAME, state_layout)
    check_integer(_NAME, accepted=accepted)
    sizes = check(
        _NAME,
        state=(state, "L P H K V" if state_layout == "kv" else "L P H V K"),
        conv_state=(conv_state, "L P C N"),
        keys=(keys, "L P S H K"),
        decays=(decays, "L P S H K"),
        deltas=(deltas, "L P S H V"),
        inputs=(inputs, "L P S C"),
        accepted=(accepted, "P"),
    )
    if sizes["C"] != sizes["H"] * (2 * sizes["K"] + sizes["V"]):
        raise ValueError(
            f"{_NAME}: conv_state has {sizes['C']} channels, want 2*H*K + H*V with H = {sizes['H']}, K = {sizes['K']},"
            f" V = {sizes['V']}"
        )


def _cost(
    state: torch.Tensor,
    conv_state: torch.Tensor,
    keys: torch.Tensor,
    decays: torch.Tensor,
    deltas: torch.Tensor,
    inputs: torch.Tensor,
    accepted: torch.Tensor,
    **attributes: object,
) -> Cost:
    """As if all were accepted: states twice, records once; three operations a state element and token."""
    read = nbytes(keys, decays, deltas, inputs, accepted)
    return Cost(bytes=2 * nbytes(state, conv_state) + read, flops=3 * state.numel() * keys.shape[2])


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor(a!) state, Tensor(b!) conv_state, Tensor keys, Tensor decays, Tensor deltas, Tensor inputs,"
            ' Tensor accepted, *, str state_layout="kv") -> ()'
        ),
        summary="fold the records of accepted tokens into the states of all layers",
        documentation=__doc__,
        reference=kda_replay,
        fake=_fake,
        cost=_cost,
    )
)
