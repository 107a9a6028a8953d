"""``attention_residual_merge``: the second of two phases, the running sum joins the mixture of the finished blocks.

With w = query * norm_weight (query alone without ``norm_weight``):

    l = (w . partial) * rsqrt(mean(partial^2) + eps);  a = sigmoid(l - lse);  out = (1 - a) history + a partial
    out = out * rsqrt(mean(out^2) + out_eps) * out_norm_weight       (only with out_norm_weight)

Shapes: ``history`` [..., D] and ``lse`` [...], fp32, of one query as ``attention_residual_history`` returns them;
``partial`` [..., D]; ``query`` with D elements; ``norm_weight`` and ``out_norm_weight`` [D]. Arithmetic in fp32, one
rounding. Returns [..., D] in the type of ``partial``.

Source: the Kimi K3 technical report, section 5.4.2. Errors: none at run time; the fake implementation raises ValueError
for shapes that do not fit.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check_vectors
from kimigraph.ir.reference.attention_residual_merge import attention_residual_merge

_NAME = "attention_residual_merge"


def _fake(
    history: torch.Tensor,
    lse: torch.Tensor,
    partial: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    out_norm_weight: torch.Tensor | None = None,
    *,
    eps: float,
    out_eps: float = 1e-5,
) -> torch.Tensor:
    if partial.dim() == 0 or history.shape != partial.shape or lse.shape != partial.shape[:-1]:
        raise ValueError(
            f"{_NAME}: history is {list(history.shape)}, lse {list(lse.shape)}, partial {list(partial.shape)}; want"
            " [..., D], [...] and [..., D]"
        )
    width = partial.shape[-1]
    check_vectors(_NAME, width, query=query, norm_weight=norm_weight, out_norm_weight=out_norm_weight)
    return partial.new_empty(partial.shape)


def _cost(
    history: torch.Tensor,
    lse: torch.Tensor,
    partial: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    out_norm_weight: torch.Tensor | None = None,
    **attributes: object,
) -> Cost:
    read = nbytes(history, lse, partial, query, norm_weight, out_norm_weight)
    return Cost(bytes=read + nbytes(partial), flops=12 * partial.numel())


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor history, Tensor lse, Tensor partial, Tensor query, Tensor? norm_weight=None,"
            " Tensor? out_norm_weight=None, *, float eps, float out_eps=1e-5) -> Tensor"
        ),
        summary="the running sum joins the mixture of finished blocks, with the norm behind",
        documentation=__doc__,
        reference=attention_residual_merge,
        fake=_fake,
        cost=_cost,
    )
)
