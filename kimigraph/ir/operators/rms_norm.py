"""``rms_norm``: the root-mean-square norm over the last dim, of a sum if there is a residual.

    t = x + residual                          rounded to the type of x
    out = t / sqrt(mean_d(t^2) + eps) * weight

Shapes: ``x`` and ``residual`` [..., D] of one type; ``weight`` [D], ones when None. Arithmetic in fp32 with one
rounding at the end; with ``rounds_first`` the normed values are rounded to the type of ``x`` before they meet the
weight, too, as models of the Llama family do. Returns [..., D] in the type of ``x``, contiguous.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization. Errors: none at run time; the fake implementation
raises ValueError for shapes that do not fit.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check_vectors
from kimigraph.ir.reference.rms_norm import rms_norm

_NAME = "rms_norm"


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float,
    rounds_first: bool = False,
) -> torch.Tensor:
    if x.dim() == 0:
        raise ValueError(f"{_NAME}: x has no dim to reduce")
    check_vectors(_NAME, x.shape[-1], weight=weight)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"{_NAME}: residual is {residual.dtype}{list(residual.shape)}, x {x.dtype}{list(x.shape)}")
    return x.new_empty(x.shape)


def _cost(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    **attributes: object,
) -> Cost:
    return Cost(bytes=2 * nbytes(x) + nbytes(weight, residual), flops=(4 + (residual is not None)) * x.numel())


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor x, Tensor? weight=None, Tensor? residual=None, *, float eps, bool rounds_first=False) -> Tensor"
        ),
        summary="root-mean-square norm over the last dim, of a sum if there is a residual",
        documentation=__doc__,
        reference=rms_norm,
        fake=_fake,
        cost=_cost,
    )
)
