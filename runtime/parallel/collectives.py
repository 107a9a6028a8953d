"""Code of one rank that asks for collectives: driven over a real group, or with all its peers in one process.

A rank is a generator: it yields what it needs (``Sum``, ``Maximum``, ``Gather``) and is sent the answer. So the same
text runs under torch.distributed and, for tests and counts, as any number of simulated ranks.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from kimigraph.ir.errors import CompileError

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


def in_lock_step(ranks: Sequence[Rank[T]]) -> tuple[list[T], int]:
    """The results of all ranks, driven together, and the bytes that they put on the wire.

    Each rank counts what it contributes to a collective once. CompileError where ranks ask for different collectives.
    """
    results: dict[int, T] = {}
    answer: torch.Tensor | None = None
    sent = 0
    while True:
        requests: list[Request] = []
        for number, rank in enumerate(ranks):
            try:
                requests.append(next(rank) if answer is None else rank.send(answer))
            except StopIteration as end:
                results[number] = end.value
        if not requests:
            return [results[number] for number in range(len(ranks))], sent
        forms = {(type(one), tuple(one.tensor.shape), one.tensor.dtype) for one in requests}
        if len(requests) < len(ranks) or len(forms) > 1:
            raise CompileError(f"ranks ask for different collectives: {len(requests)} of {len(ranks)}, {forms}")
        answer = _answer(type(requests[0]), torch.stack([one.tensor for one in requests]))
        sent += sum(one.tensor.numel() * one.tensor.element_size() for one in requests)


def over_group(rank: Rank[T], group: dist.ProcessGroup | None = None) -> T:
    """The result of this process's rank, its collectives over ``group`` (all processes)."""
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


def _answer(kind: type[Request], stacked: torch.Tensor) -> torch.Tensor:
    if kind is Gather:
        return stacked
    return stacked.sum(0, dtype=stacked.dtype) if kind is Sum else stacked.amax(0)
