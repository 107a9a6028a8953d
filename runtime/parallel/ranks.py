"""This process as one of the ranks of a program."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from kimigraph.ir import ranks
from kimigraph.ir.env import started_ranks
from kimigraph.ir.errors import CompileError, UsageError
from kimigraph.ir.mesh import DeviceMesh
from kimigraph.ir.program import InputSpec

T = TypeVar("T")


def join_ranks(mesh: DeviceMesh, target: str) -> int:
    """Join the ranks of ``mesh``, and return the rank of this process in its program: 0 of a program for one.

    UsageError where torchrun did not start as many.
    """
    if mesh.size == 1:
        return 0
    if ranks.has_joined():
        return ranks.rank_in(ranks.ALL_RANKS)
    if started_ranks() is None and not dist.is_initialized():
        raise UsageError(
            f"the program is for {mesh.size} ranks, and this process is one: start it with "
            f"`torchrun --nproc-per-node {mesh.size} -m kimigraph ...`"
        )
    try:
        return ranks.join(mesh.sizes, target.partition(":")[0])
    except ValueError as error:
        raise UsageError(
            f"{error}: give torchrun as many processes as --tp, --sp and --dp say, or compile for as many"
        ) from error


def require_joined(ways: int) -> None:
    """UsageError unless this process can take part in the collectives of a program for ``ways`` ranks."""
    if ways > 1 and not ranks.has_joined():
        raise UsageError(
            f"the program is for {ways} ranks, and this process has not joined them: "
            "kimigraph.runtime.parallel.join_ranks does, in each of the processes that torchrun started"
        )


def first_then_others(ways: int, rank: int, make: Callable[[], T], identity: Callable[[T], str]) -> T:
    """What ``make`` gives: on rank 0 at once, on the others when it is through there, and a cache has what it took.

    CompileError where a rank made another program than rank 0: their collectives would not meet.
    """
    if ways == 1:
        return make()
    made = make() if rank == 0 else None
    told = [None if made is None else identity(made)]
    dist.broadcast_object_list(told, group=ranks.group_of(ranks.ALL_RANKS), group_src=0)
    if made is None:
        made = make()
    if identity(made) != told[0]:
        raise CompileError(
            f"rank {rank} has the program {identity(made)} and rank 0 the program {told[0]}: give all ranks the same "
            "versions, model and options"
        )
    return made


def gathered(spec: InputSpec, tensor: torch.Tensor) -> torch.Tensor:
    """The whole of an input of which each rank has a part; every rank must ask."""
    share = spec.shared
    return tensor if share is None else share.join(ranks.whole_of(tensor, share.ways, spec.share_step))


def of_all_replicas(mine: T, ways: int, replicas: int) -> list[T]:
    """What the first rank of each replica has, in their order; every rank must ask."""
    if replicas == 1:
        return [mine]
    found: list[Any] = [None] * (ways * replicas)
    dist.all_gather_object(found, mine)
    return found[::ways]
