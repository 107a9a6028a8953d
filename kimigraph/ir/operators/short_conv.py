"""``short_conv``: the depthwise causal convolution in front of KDA, over a run of tokens.

    y[b, s, c] = f(sum_j weight[c, j] * window[b, s + j, c]),  window = the last W - 1 earlier inputs, then x
    f is SiLU if ``activation``, else the identity

Shapes: ``x`` [B, S, C]; ``weight`` [C, W] or [C, 1, W]; ``initial_state`` [B, C, N], N >= W - 1, the last N raw inputs,
newest last, zeros when None, never written. Arithmetic in fp32.

Returns ``y`` [B, S, C] in the type of ``x`` and ``final_state`` [B, C, W - 1], the last raw inputs, in the type of
``initial_state`` (of ``x`` without one). S may be less than W - 1, even 0; W = 1 has an empty state.

Source: Kimi Linear technical report. Errors: none at run time; the fake implementation raises ValueError for shapes
that do not fit.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check
from kimigraph.ir.reference.short_conv import short_conv

_NAME = "short_conv"


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    activation: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = check(
        _NAME,
        x=(x, "B S C"),
        weight=(weight, "C one W" if weight.dim() == 3 else "C W"),
        initial_state=(initial_state, "B C N"),
    )
    kept = sizes["W"] - 1
    if sizes.get("N", kept) < kept:
        raise ValueError(f"{_NAME}: initial_state holds {sizes['N']} inputs, a width of {sizes['W']} needs {kept}")
    state = x if initial_state is None else initial_state
    return x.new_empty(x.shape), state.new_empty((sizes["B"], sizes["C"], kept))


def _cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    activation: bool,
) -> Cost:
    kept = x.shape[0] * weight.numel() * x.element_size()
    return Cost(
        bytes=2 * nbytes(x) + nbytes(weight, initial_state) + kept,
        flops=2 * x.shape[0] * x.shape[1] * weight.numel(),
    )


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=("(Tensor x, Tensor weight, Tensor? initial_state=None, *, bool activation) -> (Tensor, Tensor)"),
        summary="depthwise causal convolution over a run of tokens",
        documentation=__doc__,
        reference=short_conv,
        fake=_fake,
        cost=_cost,
    )
)
