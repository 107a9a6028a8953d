"""Code of one rank that asks for collectives: driven over a real group, or with all its peers in one process.

A rank is a generator: it yields what it needs (``Sum``, ``Maximum``, ``Gather``) and is sent the answer. So the same
text runs under torch.distributed (``over_group``) and, for tests and self-tests, as any number of simulated ranks
(``kimigraph.ir.lock_step.in_lock_step``).
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A collective over ``tensor``, of equal shape and type on all ranks."""

    tensor: torch.Tensor


class Sum(Request):
    """The sum over ranks."""


class Maximum(Request):
    """The largest over ranks, element by element."""


class Gather(Request):
    """The tensors of all ranks, stacked in their order along a new first dim."""


Rank = Generator[Request, torch.Tensor, T]


def over_group(rank: Rank[T], group: Any = None) -> T:
    """The result of this process's rank, its collectives over ``group`` (None: all processes)."""
    try:
        request = next(rank)
        while True:
            parts = [torch.empty_like(request.tensor) for _ in range(dist.get_world_size(group))]
            if isinstance(request, Gather):
                dist.all_gather(parts, request.tensor.contiguous(), group)
                answer = torch.stack(parts)
            else:
                answer = request.tensor.clone()
                operation = dist.ReduceOp.SUM if isinstance(request, Sum) else dist.ReduceOp.MAX
                dist.all_reduce(answer, operation, group)
            request = rank.send(answer)
    except StopIteration as end:
        return end.value
