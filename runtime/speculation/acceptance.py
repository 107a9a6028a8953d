"""Which drafts stay: greedily, or by rejection sampling that leaves the model's own distribution as it is.

Source: "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimigraph.runtime.generation.sampling import Sampling, distribution


@dataclass(frozen=True)
class Accepted:
    """``counts`` [B]: new tokens of each row, of ``tokens`` [B, 1 + n] the first ones. Both where the logits are."""

    counts: Tensor
    tokens: Tensor


def accept_greedy(logits: Tensor, drafts: Tensor) -> Accepted:
    """Drafts [B, n] stay as long as each is the likeliest token; then comes the likeliest itself.

    Row i of ``logits`` [B, 1 + n, V] speaks of draft i, the last of what follows all. A draft of -1 is none.
    """
    best = logits.argmax(-1)
    stay = (best[:, :-1] == drafts).long().cumprod(-1).sum(-1)
    return Accepted(stay + 1, best)


def accept_sampled(likely: Tensor, drafts: Tensor, uniform: Tensor, proposed: Tensor | None = None) -> Accepted:
    """A draft stays with probability min(1, p / q); the first that does not is replaced by a draw from max(p - q, 0).

    ``likely`` [B, 1 + n, V] are the model's probabilities p, temperature, top-k and top-p applied; ``drafts`` [B, n],
    -1 for none; ``proposed`` [B, n, V] the distributions q that they were drawn from (None: each was certain);
    ``uniform`` [B, 1 + n] in [0, 1), the last for the token behind those that stay. When all stay it comes from p.
    """
    batch, rows, vocabulary = likely.shape
    index = drafts.clamp_min(0).unsqueeze(-1)
    if proposed is None:
        proposed = torch.zeros_like(likely[:, :-1]).scatter_(-1, index, 1.0)
    target = likely[:, :-1].gather(-1, index).squeeze(-1)
    given = proposed.gather(-1, index).squeeze(-1)
    stays = (uniform[:, :-1] * given < target) & (drafts >= 0)
    stay = stays.long().cumprod(-1).sum(-1)
    # Behind the drafts of a row there is nothing to take away.
    taken = torch.cat([proposed * (drafts >= 0).unsqueeze(-1), torch.zeros_like(likely[:, :1])], dim=1)
    place = stay.reshape(batch, 1, 1).expand(batch, 1, vocabulary)
    here = likely.gather(1, place).squeeze(1)
    rest = (here - taken.gather(1, place).squeeze(1)).clamp_min(0.0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, here)
    last = drawn(rest, uniform[:, -1])
    padded = torch.cat([drafts, drafts.new_zeros(batch, 1)], dim=-1)
    at = torch.arange(rows, device=drafts.device)
    return Accepted(stay + 1, torch.where(at == stay.unsqueeze(-1), last.unsqueeze(-1), padded))


def drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """One index of each row of ``weights`` [B, V] >= 0, in proportion to them, by numbers [B] in [0, 1)."""
    sums = weights.cumsum(-1)
    picks = (sums <= (uniform.to(sums.dtype) * sums[:, -1]).unsqueeze(-1)).sum(-1)
    places = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, places, 0).amax(-1)  # what rounding leaves above the sum belongs to the last
    return torch.minimum(picks, last)


def likelihoods(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Probabilities fp64 [B, S, V] of what each row may draw; a greedy row's likeliest token is certain."""
    batch, rows, vocabulary = logits.shape

    def column(values: list[float] | list[int]) -> Tensor:
        return torch.tensor(values, device=logits.device).repeat_interleave(rows)

    warm = [sampling.temperature > 0 for sampling in samplings]
    ordered, tokens = distribution(
        logits.reshape(-1, vocabulary),
        column([sampling.temperature if hot else 1.0 for sampling, hot in zip(samplings, warm, strict=True)]).double(),
        column([sampling.top_k for sampling in samplings]),
        column([sampling.top_p for sampling in samplings]).double(),
    )
    drawn_from = torch.zeros_like(ordered).scatter_(-1, tokens, ordered).reshape(batch, rows, vocabulary)
    certain = torch.zeros_like(drawn_from).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(torch.tensor(warm, device=logits.device).reshape(-1, 1, 1), drawn_from, certain)
