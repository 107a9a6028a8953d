"""The first k keys of a sequence that ranks share out, exactly, with few bytes between them.

Each rank scores its keys and takes its own first k: under a strict order (score descending, token ascending) the first
k of all are among them. Of these most cannot win: a histogram over all ranks bounds the k-th score from below, and only
candidates at or above the bound are sent, in a fixed room of 1.25 k / W a rank. Where a rank has more (ties, or winners
that lie on few ranks) all k of every rank are sent instead. A candidate is 8 bytes: score, and token as int32.

NaN scores as -inf, -0 as +0, as in ``lightning_indexer``; hidden keys never win. Sources: vLLM's decode context
parallelism for the exchange; the bound and its cap are this project's.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kimigraph.ir.reference.collectives import Gather, Maximum, Rank, Sum
from kimigraph.ir.reference.sequence_shards import SequenceShards

BINS = 256
CANDIDATE_BYTES = 8
_NO_TOKEN = -1


@dataclass(frozen=True)
class Candidates:
    """``scores`` fp32 [R, k] and ``tokens`` int32 [R, k] of a rank in order, behind the last -inf and -1."""

    scores: Tensor
    tokens: Tensor

    @property
    def valid(self) -> Tensor:
        """Which entries are keys."""
        return self.tokens >= 0


@dataclass(frozen=True)
class Exchanged:
    """``tokens`` int32 [R, k] of the whole sequence, ascending, then -1; whether all candidates were sent."""

    tokens: Tensor
    overflowed: bool


def room(k: int, ways: int) -> int:
    """Candidates that a rank sends at most: a quarter more than its even share."""
    return min(k, math.ceil(1.25 * k / ways))


def bytes_a_row(k: int, ways: int) -> dict[str, int]:
    """Bytes that all ranks together put on the wire for a row: pruned, an overflow on top of it, and without pruning.

    Pruned: three limits, the histogram, and the room with a line that says how many candidates there are.
    """
    words = 3 + BINS
    return {
        "pruned": ways * (4 * words + CANDIDATE_BYTES * (1 + room(k, ways))),
        "overflow": ways * CANDIDATE_BYTES * (1 + k),
        "unpruned": ways * CANDIDATE_BYTES * k,
    }


def local_candidates(scores: Tensor, visible: Tensor, tokens: Tensor, k: int) -> Candidates:
    """A rank's first k of ``scores`` and ``visible`` [R, n]; ``tokens`` [n] or [R, n] of the sequence, ascending."""
    scores = torch.where(scores.isnan(), -math.inf, scores.float()) + 0.0
    order = scores.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, (~visible).gather(-1, order).int().argsort(dim=-1, stable=True))[:, :k]
    shown = visible.gather(-1, order)
    ids = torch.where(shown, tokens.to(torch.int32).expand(scores.shape).gather(-1, order), _NO_TOKEN)
    best = torch.where(shown, scores.gather(-1, order), -math.inf)
    lacking = (0, k - order.shape[-1])
    return Candidates(
        torch.nn.functional.pad(best, lacking, value=-math.inf), torch.nn.functional.pad(ids, lacking, value=_NO_TOKEN)
    )


def exchange(own: Candidates, k: int, ways: int) -> Rank[Exchanged]:
    """One rank of the exchange; every rank gets the same answer."""
    if ways == 1:
        return Exchanged(_first_listed(own, k), False)
    least = yield Maximum(_score_limits(own))
    bins = _score_bins(own, least)
    counts = yield Sum(_bin_counts(bins))
    sent = own.valid & (bins >= _least_bin(counts, k).unsqueeze(-1))
    gathered = yield Gather(_packed_candidates(own, sent, room(k, ways)))
    overflowed = bool((gathered[..., 0, 0] > room(k, ways)).any())
    if overflowed:
        gathered = yield Gather(_packed_candidates(own, own.valid, k))
    return Exchanged(_first_listed(_unpacked_candidates(gathered), k), overflowed)


def exchange_all(own: Candidates, k: int, ways: int) -> Rank[Exchanged]:
    """The same without a bound: each rank sends its first k."""
    if ways == 1:
        return Exchanged(_first_listed(own, k), False)
    gathered = yield Gather(_packed_candidates(own, own.valid, k)[..., 1:, :])
    return Exchanged(_first_listed(_unpacked_candidates(gathered, 0), k), False)


def owned(tokens: Tensor, shards: SequenceShards, rank: int) -> Tensor:
    """Of picks [R, k] those that ``rank`` holds, as its own places int32, ascending at the front, then -1."""
    places = torch.where((tokens >= 0) & (shards.owner(tokens) == rank), shards.local(tokens), _largest(tokens))
    places = places.sort(dim=-1).values
    return torch.where(places == _largest(tokens), _NO_TOKEN, places).to(torch.int32)


def _largest(tokens: Tensor) -> int:
    return torch.iinfo(tokens.dtype).max


def _score_limits(own: Candidates) -> Tensor:
    """Each row's k-th score if the rank has k keys, its largest finite score and minus its least, [R, 3]."""
    finite = own.valid & own.scores.isfinite()
    largest = torch.where(finite, own.scores, -math.inf).amax(-1)
    least = torch.where(finite, -own.scores, -math.inf).amax(-1)
    return torch.stack([own.scores[:, -1], largest, least], dim=-1)


def _score_bins(own: Candidates, limits: Tensor) -> Tensor:
    """The bin of each candidate, int64 [R, k]: higher scores in no lower bin, the same function on every rank."""
    kth, largest, least = limits.unbind(-1)
    low = torch.where(kth.isfinite(), kth, -least)
    width = (largest.double() - low.double()).clamp_min(torch.finfo(torch.float32).tiny)
    place = (own.scores.double() - low.unsqueeze(-1).double()) * (BINS / width).unsqueeze(-1)
    place = torch.where(own.scores == math.inf, BINS - 1.0, place)
    place = torch.where(own.valid & place.isfinite(), place, 0.0).clamp(0, BINS - 1)
    return torch.where(own.valid, place.long(), _NO_TOKEN)


def _bin_counts(bins: Tensor) -> Tensor:
    counts = torch.zeros(bins.shape[0], BINS, dtype=torch.int32, device=bins.device)
    return counts.scatter_add_(1, bins.clamp_min(0), (bins >= 0).to(torch.int32))


def _least_bin(counts: Tensor, k: int) -> Tensor:
    """The highest bin with k keys in it and above, 0 where there are fewer in all: [R]."""
    above = counts.flip(-1).cumsum(-1).flip(-1)
    return (above >= k).sum(-1).sub(1).clamp_min(0)


def _packed_candidates(own: Candidates, sent: Tensor, size: int) -> Tensor:
    """Up to ``size`` of the sent ones as int32 [R, 1 + size, 2]: how many there are, then scores' bits and tokens."""
    order = (~sent).int().argsort(dim=-1, stable=True)[:, :size]
    shown = sent.gather(-1, order)
    scores = torch.where(shown, own.scores.gather(-1, order), -math.inf).view(torch.int32)
    tokens = torch.where(shown, own.tokens.gather(-1, order), _NO_TOKEN)
    lines = torch.nn.functional.pad(torch.stack([scores, tokens], dim=-1), (0, 0, 0, size - order.shape[-1]), value=-1)
    head = torch.stack([sent.sum(-1), torch.zeros_like(sent.sum(-1))], dim=-1).to(torch.int32)
    return torch.cat([head.unsqueeze(1), lines], dim=1)


def _unpacked_candidates(gathered: Tensor, head: int = 1) -> Candidates:
    """Candidates of all ranks side by side, from [W, R, head + size, 2]."""
    lines = gathered[:, :, head:].transpose(0, 1).flatten(1, 2)
    return Candidates(lines[..., 0].contiguous().view(torch.float32), lines[..., 1].contiguous())


def _first_listed(found: Candidates, k: int) -> Tensor:
    """The first k under (score descending, token ascending), listed ascending, behind the last -1."""
    order = torch.where(found.valid, found.tokens, _largest(found.tokens)).argsort(dim=-1, stable=True)
    scores, valid = found.scores.gather(-1, order), found.valid.gather(-1, order)
    by_score = scores.argsort(dim=-1, descending=True, stable=True)
    by_score = by_score.gather(-1, (~valid).gather(-1, by_score).int().argsort(dim=-1, stable=True))[:, :k]
    picked = found.tokens.gather(-1, order.gather(-1, by_score))
    picked = torch.where(picked < 0, _largest(picked), picked).sort(dim=-1).values
    listed = torch.where(picked == _largest(picked), _NO_TOKEN, picked)
    return torch.nn.functional.pad(listed, (0, k - listed.shape[-1]), value=_NO_TOKEN)
