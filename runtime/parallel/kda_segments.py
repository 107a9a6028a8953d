"""KDA over a sequence of which each rank has one stretch, in prefill: what a stretch does to a state is one matrix.

A step is S <- (I - beta k k^T) diag(alpha) S + beta k v^T, which is affine in S. A stretch therefore makes M S + S~ of
the state S that comes in: S~ is its final state from zero, and M its final state from the identity with no values. Both
have a fixed size; all ranks get those of all, and each composes what comes in before it. (Adding up final states, as
for linear attention without a delta rule, is wrong: M is no multiple of the identity.)

Source: the technical report of Kimi K3, section 5.1.2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kimigraph.runtime.parallel.collectives import Gather, Rank

Chunked = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``kda_prefill`` over (q, k, v, g, beta, initial state), its other operands and attributes given: out, final state."""


@dataclass(frozen=True)
class Stretch:
    """A rank's part of a sequence: q, k [B, T, H, K], v [B, T, H, V], g [B, T, H, K], beta [B, T, H]. T may be 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.q.shape[1]


def summary(stretch: Stretch, prefill: Chunked) -> tuple[Tensor, Tensor]:
    """``M`` fp32 [B, H, K, K] and ``S~`` fp32 [B, H, K, V] of a stretch; ``prefill`` takes states as [B, H, K, V]."""
    batch, _, heads, key_dim = stretch.q.shape
    identity = torch.eye(key_dim, device=stretch.q.device).expand(batch, heads, key_dim, key_dim).contiguous()
    nothing = identity.new_zeros(batch, heads, key_dim, stretch.v.shape[-1])
    if stretch.tokens == 0:
        return identity, nothing
    silent = stretch.v.new_zeros(*stretch.q.shape[:3], key_dim)
    _, transition = prefill(stretch.q, stretch.k, silent, stretch.g, stretch.beta, identity)
    _, own = prefill(stretch.q, stretch.k, stretch.v, stretch.g, stretch.beta, nothing)
    return transition, own


def compose(state: Tensor, transitions: Tensor, states: Tensor) -> list[Tensor]:
    """The state in front of each stretch and behind the last one: ``state`` [B, H, K, V] and W summaries in order."""
    found = [state]
    for transition, own in zip(transitions, states, strict=True):
        found.append(transition @ found[-1] + own)
    return found


def over_stretches(stretch: Stretch, state: Tensor, rank: int, prefill: Chunked) -> Rank[tuple[Tensor, Tensor]]:
    """One rank's outputs [B, T, H, V], and the state behind the whole sequence, the same on every rank.

    ``state`` is that in front of the sequence. Two tensors of fixed size a rank cross the wire.
    """
    transition, own = summary(stretch, prefill)
    transitions = yield Gather(transition)
    states = yield Gather(own)
    along = compose(state, transitions, states)
    if stretch.tokens == 0:
        return stretch.v, along[-1]
    out, _ = prefill(stretch.q, stretch.k, stretch.v, stretch.g, stretch.beta, along[rank])
    return out, along[-1]


def convolution_window(inputs: Tensor, window: Tensor, rank: int) -> Rank[tuple[Tensor, Tensor]]:
    """The last raw inputs [B, C, N] in front of a rank's stretch ``inputs`` [B, T, C], and behind the whole sequence.

    ``window`` [B, C, N] is that in front of the sequence. Stretches may be shorter than the window.
    """
    columns = window.shape[-1]
    last = inputs.transpose(1, 2)[..., max(inputs.shape[1] - columns, 0) :]
    counts = yield Gather(torch.tensor([last.shape[-1]], device=inputs.device))
    tails = yield Gather(torch.nn.functional.pad(last, (columns - last.shape[-1], 0)))
    along = [window]
    for count, tail in zip(counts[:, 0].tolist(), tails, strict=True):
        along.append(
            torch.cat([along[-1], tail[..., columns - count :]], dim=-1)[..., -columns:] if columns else window
        )
    return along[rank], along[-1]
