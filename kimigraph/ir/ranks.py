"""Processes that run one program together: their group, by the name that collectives of the graph say.

An artifact of several ranks carries this file's text as ``support/ranks.py``, so it imports torch alone.
"""

from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(hours=1)
"""How long ranks wait for one that compiles. Who waits for one that died is stopped by torchrun, long before."""
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def join(name: str, ways: int, device: str, replicas: int = 1) -> int:
    """Make this process one of the ``ways`` ranks of group ``name``, and return its rank there.

    Neighbouring processes are a group; there are ``replicas`` of them, each for itself.

    torchrun says who the others are (``env://``). ``device`` is ``cpu`` (Gloo) or ``cuda`` (NCCL): the ranks of a
    machine take its GPUs in turn. A process that has joined stays. ValueError where there are more or fewer ranks.
    """
    if not dist.is_initialized():
        dist.init_process_group(_BACKENDS[device], timeout=PATIENCE)
        if device == "cuda":
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    if dist.get_world_size() != ways * replicas:
        told = f"{replicas} times {ways}" if replicas > 1 else str(ways)
        raise ValueError(f"the program is for {told} ranks, and {dist.get_world_size()} were started")
    if not has_joined(name):
        groups = [dist.new_group(list(range(first, first + ways))) for first in range(0, ways * replicas, ways)]
        _registry()["_register_process_group"](name, groups[dist.get_rank() // ways])
    return rank_in(name)


def rank_in(name: str) -> int:
    """The rank of this process in group ``name``."""
    return dist.get_rank(group_of(name))


def group_of(name: str) -> Any:
    """The process group of that name, which this process has joined."""
    return _registry()["_resolve_process_group"](name)


def has_joined(name: str) -> bool:
    """Whether collectives of group ``name`` can run in this process."""
    try:
        group_of(name)
    except (RuntimeError, ValueError):
        return False
    return True


def rows_of(x: torch.Tensor, ways: int, rank: int) -> torch.Tensor:
    """A view of the rows of ``rank``; ValueError where ``ways`` does not divide them."""
    if x.shape[0] % ways:
        raise ValueError(f"own_rows: {ways} ranks do not divide {x.shape[0]} rows")
    own = x.shape[0] // ways
    return x.narrow(0, rank * own, own)


def own_rows(x: torch.Tensor, ways: int, name: str) -> torch.Tensor:
    """A view of the rows of this process's rank in group ``name``."""
    return rows_of(x, ways, rank_in(name))


def whole_of(part: torch.Tensor, ways: int, name: str) -> list[torch.Tensor]:
    """What all ``ways`` ranks of group ``name`` have of a tensor, in their order; every one of them must ask."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(ways)]
    dist.all_gather(parts, part.contiguous(), group_of(name))
    return parts


def leave() -> None:
    """End the group; collectives that are under way end first."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _registry() -> dict[str, Any]:
    """torch's registry of groups by name, which its functional collectives read."""
    return vars(import_module("torch._C._distributed_c10d"))
