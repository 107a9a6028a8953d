"""The first k keys of a sequence that ranks share out, exactly, with few bytes between them.

Each rank scores its keys and takes its own first k: under a strict order (score descending, token ascending) the first
k of all are among them. A histogram over all ranks says which bin the k-th of all falls into, how many lie above it,
which all win, and how many in it: these alone are contested, and sent, in a fixed room of k / 8 a rank. Where there are
more (ties, scores far apart) up to k a rank are sent instead. So each rank finds the last winner, and which of its own
candidates are not behind it. A candidate is 8 bytes: score, and token as int32.

NaN scores as -inf, -0 as +0, as in ``lightning_indexer``; hidden keys never win. Sources: vLLM's decode context
parallelism for the exchange; the contested bin is this project's.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kimigraph.ir.reference.collectives import Gather, Maximum, Rank, Sum

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
    """``tokens`` int32 [R, k] of the rank's own among the first k of all, ascending, then -1.

    ``contested`` [R]: candidates of all ranks in the last winner's bin; ``overflowed``: whether up to k were sent.
    """

    tokens: Tensor
    contested: Tensor
    overflowed: bool = False


def room(k: int) -> int:
    """Contested candidates for which a rank has room, and all ranks together where it is to be enough."""
    return math.ceil(k / 8)


def bytes_a_row(k: int, ways: int) -> dict[str, int]:
    """Bytes that all ranks together put on the wire for a row: pruned, an overflow on top of it, and without pruning.

    Pruned: three limits, the histogram, and the room.
    """
    return {
        "pruned": ways * (4 * (3 + BINS) + CANDIDATE_BYTES * room(k)),
        "overflow": ways * CANDIDATE_BYTES * (k - room(k)),
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
    """One rank of the exchange."""
    if ways == 1:
        return Exchanged(_listed(own, own.valid), own.valid.sum(-1))
    limits = yield Maximum(_score_limits(own))
    bins = _score_bins(own, limits)
    counts = yield Sum(_bin_counts(bins))
    last, above, contested = (number.unsqueeze(-1) for number in _last_bin(counts, k))
    disputed = (bins >= 0) & (bins == last)
    overflowed = bool((contested > room(k)).logical_and(above + contested > k).any())
    gathered = yield Gather(_packed_candidates(own, disputed, k if overflowed else room(k)))
    before = _not_behind(own, _unpacked_candidates(gathered), k - above)
    all_win = above + contested <= k  # and the room may be too small for them
    wins = (bins > last) | (disputed & (before | all_win))
    return Exchanged(_listed(own, wins), contested.squeeze(-1), overflowed)


def exchange_all(own: Candidates, k: int, ways: int) -> Rank[Exchanged]:
    """The same without a histogram: each rank sends its first k."""
    found = own
    if ways > 1:
        found = _unpacked_candidates((yield Gather(_packed_candidates(own, own.valid, k))))
    wins = own.valid & _not_behind(own, found, torch.full_like(own.tokens[:, :1], k))
    return Exchanged(_listed(own, wins), found.valid.sum(-1))


def _score_limits(own: Candidates) -> Tensor:
    """Each row's k-th score if the rank has k keys, its largest finite score and minus its least, [R, 3]."""
    finite = own.valid & own.scores.isfinite()
    largest = torch.where(finite, own.scores, -math.inf).amax(-1)
    least = torch.where(finite, -own.scores, -math.inf).amax(-1)
    return torch.stack([own.scores[:, -1], largest, least], dim=-1)


def _score_bins(own: Candidates, limits: Tensor) -> Tensor:
    """The bin of each candidate, int64 [R, k]: higher scores in no lower bin, the same function on every rank.

    -1 for what does not reach the k-th score of some rank, and so cannot win.
    """
    kth, largest, least = limits.unbind(-1)
    low = torch.where(kth.isfinite(), kth, -least)
    width = (largest.double() - low.double()).clamp_min(torch.finfo(torch.float32).tiny)
    place = (own.scores.double() - low.unsqueeze(-1).double()) * (BINS / width).unsqueeze(-1)
    place = torch.where(own.scores == math.inf, BINS - 1.0, place)
    place = torch.where(own.valid & place.isfinite(), place, 0.0).clamp(0, BINS - 1)
    return torch.where(own.valid & (own.scores >= kth.unsqueeze(-1)), place.long(), -1)


def _bin_counts(bins: Tensor) -> Tensor:
    counts = torch.zeros(bins.shape[0], BINS, dtype=torch.int32, device=bins.device)
    return counts.scatter_add_(1, bins.clamp_min(0), (bins >= 0).to(torch.int32))


def _last_bin(counts: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The highest bin with k keys in it and above, -1 where there are fewer in all; how many are above, and in it."""
    above = counts.flip(-1).cumsum(-1).flip(-1)
    last = (above >= k).sum(-1) - 1
    higher = torch.where(above < k, above, 0).amax(-1)
    inside = counts.gather(-1, last.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return last, higher, torch.where(last < 0, 0, inside)


def _packed_candidates(own: Candidates, sent: Tensor, size: int) -> Tensor:
    """The first ``size`` of those ``sent``, as int32 [R, size, 2]: scores' bits and tokens, -1 behind the last."""
    order = (~sent).int().argsort(dim=-1, stable=True)[:, :size]
    scores, tokens = own.scores.gather(-1, order).view(torch.int32), own.tokens.gather(-1, order)
    lines = torch.where(sent.gather(-1, order).unsqueeze(-1), torch.stack([scores, tokens], dim=-1), _NO_TOKEN)
    return torch.nn.functional.pad(lines, (0, 0, 0, size - order.shape[-1]), value=_NO_TOKEN)


def _unpacked_candidates(gathered: Tensor) -> Candidates:
    """Candidates of all ranks side by side, from [W, R, size, 2]."""
    lines = gathered.transpose(0, 1).flatten(1, 2)
    return Candidates(lines[..., 0].contiguous().view(torch.float32), lines[..., 1].contiguous())


def _not_behind(own: Candidates, found: Candidates, wanted: Tensor) -> Tensor:
    """Which of the rank's candidates are not behind the ``wanted``-th [R, 1] of those found, or behind the last one."""
    tokens = torch.where(found.valid, found.tokens, torch.iinfo(torch.int32).max)
    scores = torch.where(found.valid, found.scores, -math.inf)
    order = tokens.argsort(dim=-1, stable=True)
    order = order.gather(-1, scores.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
    cut = order.gather(-1, (wanted.long() - 1).clamp(0, order.shape[-1] - 1))
    score, token = scores.gather(-1, cut), tokens.gather(-1, cut)
    return (own.scores > score) | ((own.scores == score) & (own.tokens <= token))


def _listed(own: Candidates, wins: Tensor) -> Tensor:
    """The tokens that win, ascending, then -1."""
    none = torch.iinfo(torch.int32).max
    tokens = torch.where(wins, own.tokens, none).sort(dim=-1).values
    return torch.where(tokens == none, _NO_TOKEN, tokens)
