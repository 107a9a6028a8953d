"""``exchange_picks``: the first k keys of a sequence that ranks share out, of which each rank has picked its own first.

Shapes: ``scores`` fp32 [B, S, n] and ``places`` int32 [B, S, n], the rank's own first min(n, keys) of a row: places of
the rank's shard, ascending, then -1; n is at least k, or all keys that the rank has. Rank r of the ``ways`` of
``group`` holds token (l // run) * ways * run + r * run + l % run at place l.

Returns int32 [B, S, k]: of the first k tokens of all ranks under (score descending, token ascending; -0 as +0, NaN as
-inf) those that this rank holds, as its places, ascending, at the front, then -1.

``pruned``: three collectives, for limits of the scores, a histogram, and the candidates in the bin of the last winner,
for which each rank has a room of k / 8; where all ranks together have more, it is of k. Otherwise one collective, of
all candidates. Kernels for GPUs of one machine leave the candidates in one another's memory, as many as there are, in
one launch. The operator communicates, so it is never moved past another collective.

Source: vLLM's decode context parallelism for the exchange; the contested bin is this project's. Errors: ValueError for
shapes that do not fit and sizes that are not positive.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check, check_integer
from kimigraph.ir.reference.exchange_picks import exchange_picks
from kimigraph.ir.reference.index_exchange import bytes_a_row

_NAME = "exchange_picks"


def _fake(
    scores: torch.Tensor, places: torch.Tensor, *, k: int, ways: int, run: int, group: str, pruned: bool = True
) -> torch.Tensor:
    sizes = check(_NAME, scores=(scores, "B S N"), places=(places, "B S N"))
    check_integer(_NAME, places=places)
    if k < 0 or ways < 1 or run < 1 or not group:
        raise ValueError(f"{_NAME}: k is {k}, {ways} ranks of group '{group}' with runs of {run} tokens")
    return places.new_empty((sizes["B"], sizes["S"], k), dtype=torch.int32)


def _cost(
    scores: torch.Tensor, places: torch.Tensor, *, k: int, ways: int, run: int, group: str, pruned: bool = True
) -> Cost:
    rows = scores.shape[0] * scores.shape[1]
    told = bytes_a_row(k, ways)["pruned" if pruned else "unpruned"]
    return Cost(bytes=nbytes(scores, places) + rows * (4 * k + told), flops=0)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor scores, Tensor places, *, int k, int ways, int run, str group, bool pruned=True) -> Tensor"
        ),
        summary="the top k of a sequence that ranks share out",
        documentation=__doc__,
        reference=exchange_picks,
        fake=_fake,
        cost=_cost,
    )
)
