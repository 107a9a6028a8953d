"""``attention_residual``: a softmax-weighted sum of earlier block outputs and the running sum, per token.

With w = query * norm_weight (query alone without ``norm_weight``), for sources v_0 .. v_{n-1}:

    l_i = (w . v_i) * rsqrt(mean(v_i^2) + eps);  a = softmax(l);  out = sum_i a_i v_i
    out = out * rsqrt(mean(out^2) + out_eps) * out_norm_weight       (only with out_norm_weight)

Shapes: ``sources`` n tensors [..., D] of one shape and type; ``query`` with D elements; ``norm_weight`` and
``out_norm_weight`` [D]. The values are mixed as they are, only the logits see their norm. Arithmetic in fp32, one
rounding. Returns [..., D] in the type of the sources.

Source: the Kimi K3 technical report, equations 8 to 10. Errors: none at run time; the fake implementation raises
ValueError for no source, sources that differ and weights of another width.
"""

from collections.abc import Sequence

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check_sources, check_vectors
from kimigraph.ir.reference.attention_residual import attention_residual

_NAME = "attention_residual"


def _fake(
    sources: Sequence[torch.Tensor],
    query: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    out_norm_weight: torch.Tensor | None = None,
    *,
    eps: float,
    out_eps: float = 1e-5,
) -> torch.Tensor:
    width = check_sources(_NAME, sources)
    check_vectors(_NAME, width, query=query, norm_weight=norm_weight, out_norm_weight=out_norm_weight)
    return sources[0].new_empty(sources[0].shape)


def _cost(
    sources: Sequence[torch.Tensor],
    query: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    out_norm_weight: torch.Tensor | None = None,
    **attributes: object,
) -> Cost:
    elements = sources[0].numel()
    read = nbytes(*sources, query, norm_weight, out_norm_weight)
    return Cost(bytes=read + nbytes(sources[0]), flops=(6 * len(sources) + 4) * elements)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor[] sources, Tensor query, Tensor? norm_weight=None, Tensor? out_norm_weight=None, *, float eps,"
            " float out_eps=1e-5) -> Tensor"
        ),
        summary="softmax-weighted sum over block outputs, with the norm behind it",
        documentation=__doc__,
        reference=attention_residual,
        fake=_fake,
        cost=_cost,
    )
)
