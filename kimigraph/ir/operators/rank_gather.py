"""``rank_gather``: the parts that the ranks of a group have of a tensor, side by side along one dim, on every rank.

Shapes: ``part`` [...], of one shape and type on all ``ways`` ranks of ``group``; bf16, fp32 or int32. Returns it with
``ways`` times the size of ``dim`` (not negative), contiguous, the parts in the order of ranks.

A NaN stays a NaN, not its payload. Of int32 the least number becomes the next one: what is gathered are ids.

On GPUs of one machine that can write into one another's memory it is one launch: each rank leaves its part with every
other, and brings theirs to their places. Elsewhere it is the all-gather of torch.distributed and a copy. It
communicates, and so is never moved past another collective.

Source: as for ``rank_sum``. Errors: the fake implementation raises ValueError for another type, a dim that is not
there, fewer than one rank and an empty name.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.reference.rank_gather import rank_gather

_NAME = "rank_gather"
_DTYPES = (torch.bfloat16, torch.float32, torch.int32)


def _fake(part: torch.Tensor, *, dim: int, ways: int, group: str) -> torch.Tensor:
    if part.dtype not in _DTYPES or not 0 <= dim < part.dim() or ways < 1 or not group:
        raise ValueError(f"{_NAME}: {part.dtype}{list(part.shape)} along {dim}, {ways} ranks of group '{group}'")
    return part.new_empty((*part.shape[:dim], part.shape[dim] * ways, *part.shape[dim + 1 :]))


def _cost(part: torch.Tensor, *, dim: int, ways: int, group: str) -> Cost:
    return Cost(bytes=2 * ways * nbytes(part), flops=0)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature="(Tensor part, *, int dim, int ways, str group) -> Tensor",
        summary="the parts that the ranks of a group have of a tensor, side by side",
        documentation=__doc__,
        reference=rank_gather,
        fake=_fake,
        cost=_cost,
    )
)
