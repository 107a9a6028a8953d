"""``rank_sum``: the sum of what the ranks of a group have, on every rank.

Shapes: ``addend`` [...], of one shape and type on all ``ways`` ranks of ``group``: bf16 or fp32. Returns the same shape
and type, contiguous: the addends in the order of ranks, in fp32, rounded once; the same bits on every rank.

On GPUs of one machine that can write into one another's memory it is one launch: each rank leaves its addend with every
other and reads theirs where it lies. Elsewhere it is the all-reduce of torch.distributed, which may round between
ranks. It communicates, and so is never moved past another collective.

Source: the one-shot all-reduce of TensorRT-LLM, whose words, too, say by their value that they have come. Errors: the
fake implementation raises ValueError for another type, fewer than one rank and an empty name.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.reference.rank_sum import rank_sum

_NAME = "rank_sum"
_DTYPES = (torch.bfloat16, torch.float32)


def _fake(addend: torch.Tensor, *, ways: int, group: str) -> torch.Tensor:
    if addend.dtype not in _DTYPES or ways < 1 or not group:
        raise ValueError(f"{_NAME}: {addend.dtype} of {ways} ranks of group '{group}'")
    return addend.new_empty(addend.shape)


def _cost(addend: torch.Tensor, *, ways: int, group: str) -> Cost:
    return Cost(bytes=2 * ways * nbytes(addend), flops=(ways - 1) * addend.numel())


OPERATOR = register(
    Operator(
        name=_NAME,
        signature="(Tensor addend, *, int ways, str group) -> Tensor",
        summary="the sum of what the ranks of a group have",
        documentation=__doc__,
        reference=rank_sum,
        fake=_fake,
        cost=_cost,
    )
)
