"""Reference of ``kimigraph::rank_gather``."""

from typing import Any

import torch


def rank_gather(part: torch.Tensor, *, dim: int, ways: int, group: str) -> torch.Tensor:
    """See ``kimigraph.ir.operators.rank_gather``: by the collective of torch.distributed."""
    if ways == 1:
        return part.clone(memory_format=torch.contiguous_format)
    namespace = "_c10d_functional"
    collectives: Any = getattr(torch.ops, namespace)
    pending = collectives.all_gather_into_tensor.default(part.contiguous(), ways, group)
    return torch.cat(collectives.wait_tensor.default(pending).chunk(ways), dim)
