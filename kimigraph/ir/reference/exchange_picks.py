"""Reference of ``kimigraph::exchange_picks``."""

from importlib import import_module

import torch

from kimigraph.ir.reference.collectives import Rank, over_group
from kimigraph.ir.reference.index_exchange import exchange, exchange_all, local_candidates
from kimigraph.ir.reference.sequence_shards import SequenceShards


def exchange_picks(
    scores: torch.Tensor, places: torch.Tensor, *, k: int, ways: int, run: int, group: str, pruned: bool = True
) -> torch.Tensor:
    """See ``kimigraph.ir.operators.exchange_picks``: this process's rank of the exchange, over its group."""
    registry = vars(import_module("torch._C._distributed_c10d"))
    ranks = registry["_resolve_process_group"](group) if ways > 1 else None
    rank = 0 if ranks is None else ranks.rank()
    return over_group(exchanging(scores, places, rank, k=k, ways=ways, run=run, pruned=pruned), ranks)


def exchanging(
    scores: torch.Tensor, places: torch.Tensor, rank: int, *, k: int, ways: int, run: int, pruned: bool = True
) -> Rank[torch.Tensor]:
    """Rank number ``rank`` of the exchange."""
    shards = SequenceShards(ways, run)
    flat, own = scores.flatten(0, 1), places.flatten(0, 1)
    tokens = shards.tokens(own.clamp_min(0).long(), rank)
    ask = exchange if pruned else exchange_all
    found = (yield from ask(local_candidates(flat, own >= 0, tokens, k), k, ways)).tokens
    return torch.where(found >= 0, shards.local(found), -1).reshape(*scores.shape[:2], k)
