"""``attention_residual_history``: the first of two phases, finished blocks under the queries of many sublayers.

For each query j, with w = queries[j] * norm_weights[j] (the query alone when ``norm_weights`` is empty):

    l_i = (w . v_i) * rsqrt(mean(v_i^2) + eps);  mixture[j] = sum_i softmax(l)_i v_i;  lse[j] = log(sum_i exp(l_i))

Shapes: ``sources`` n tensors [..., D] of one shape and type; ``queries`` m tensors with D elements; ``norm_weights`` as
many [D], or none. Returns ``mixture`` fp32 [m, ..., D] and ``lse`` fp32 [m, ...]. ``attention_residual_merge`` adds the
running sum; both together are ``attention_residual`` over the sources and that sum, exactly in real arithmetic.

Source: the Kimi K3 technical report, section 5.4.2. Errors: none at run time; the fake implementation raises ValueError
for no source or query, sources that differ, and weights of another width or number.
"""

from collections.abc import Sequence

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check_sources, check_vectors
from kimigraph.ir.reference.attention_residual_history import attention_residual_history

_NAME = "attention_residual_history"


def _fake(
    sources: Sequence[torch.Tensor],
    queries: Sequence[torch.Tensor],
    norm_weights: Sequence[torch.Tensor],
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    width = check_sources(_NAME, sources)
    if not queries or len(norm_weights) not in (0, len(queries)):
        raise ValueError(
            f"{_NAME}: {len(queries)} queries and {len(norm_weights)} norm weights, want at least one query and as many"
            " norm weights, or none"
        )
    check_vectors(_NAME, width, **{f"queries[{number}]": query for number, query in enumerate(queries)})
    check_vectors(_NAME, width, **{f"norm_weights[{number}]": weight for number, weight in enumerate(norm_weights)})
    shape = (len(queries), *sources[0].shape)
    mixture = sources[0].new_empty(shape, dtype=torch.float32)
    return mixture, sources[0].new_empty(shape[:-1], dtype=torch.float32)


def _cost(
    sources: Sequence[torch.Tensor],
    queries: Sequence[torch.Tensor],
    norm_weights: Sequence[torch.Tensor],
    **attributes: object,
) -> Cost:
    elements, width = sources[0].numel(), sources[0].shape[-1]
    written = 4 * len(queries) * (elements + elements // width)
    read = nbytes(*sources, *queries, *norm_weights)
    return Cost(bytes=read + written, flops=(2 + 4 * len(queries)) * len(sources) * elements)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature="(Tensor[] sources, Tensor[] queries, Tensor[] norm_weights, *, float eps) -> (Tensor, Tensor)",
        summary="finished blocks mixed under the queries of many sublayers at once",
        documentation=__doc__,
        reference=attention_residual_history,
        fake=_fake,
        cost=_cost,
    )
)
