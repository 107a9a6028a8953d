"""Processes that run one program together: their groups, by the names that collectives of the graph say.

An artifact of several ranks carries this file's text as ``support/ranks.py``, so it imports torch alone.
"""

import sys
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = timedelta(hours=1)
"""How long ranks wait for one that compiles. Who waits for one that died is stopped by torchrun, long before."""
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
ALL_RANKS = "kimigraph.ranks"
"""The group of all ranks of a program; those along one dim of a mesh are ``kimigraph.<dim>``."""
REPLICAS, STAGES = "dp", "pp"
"""The dims of a mesh of which each place runs a program for itself: the same one, or that of its stage."""


def join(mesh: Mapping[str, int], device: str) -> int:
    """Make this process one of the ranks of ``mesh`` (sizes by dim, the outermost first); its rank in its program.

    torchrun says who the others are (``env://``). ``device`` is ``cpu`` (Gloo) or ``cuda`` (NCCL): the ranks of a
    machine take its GPUs in turn. A process that has joined stays. ValueError where there are more or fewer ranks.
    """
    size, replicas = prod(mesh.values()), mesh.get(REPLICAS, 1)
    if not dist.is_initialized():
        dist.init_process_group(_BACKENDS[device], timeout=PATIENCE)
        if device == "cuda":
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    if dist.get_world_size() != size:
        told = f"{replicas} times {size // replicas}" if replicas > 1 else str(size)
        raise ValueError(f"the program is for {told} ranks, and {dist.get_world_size()} were started")
    if not has_joined(ALL_RANKS):
        dims = {ALL_RANKS: tuple(dim for dim in mesh if dim not in (REPLICAS, STAGES))}
        dims |= {f"kimigraph.{dim}": (dim,) for dim in mesh if dim != REPLICAS and mesh[dim] > 1}
        made: dict[tuple[int, ...], Any] = {}
        for name, along in dims.items():
            for members in neighbours(mesh, along):
                made[members] = made.get(members) or dist.new_group(list(members))
                if dist.get_rank() in members:
                    _registry()["_register_process_group"](name, made[members])
    return rank_in(ALL_RANKS)


def neighbours(mesh: Mapping[str, int], along: tuple[str, ...]) -> list[tuple[int, ...]]:
    """All sets of ranks of ``mesh`` that differ in the dims ``along`` alone, each in order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*map(range, mesh.values()))):
        rest = tuple(at for dim, at in zip(mesh, place, strict=True) if dim not in along)
        found.setdefault(rest, []).append(rank)
    return [tuple(members) for members in found.values()]


def rank_in(name: str) -> int:
    """The rank of this process in group ``name``."""
    return dist.get_rank(group_of(name))


def group_of(name: str) -> Any:
    """The process group of that name, which this process has joined."""
    return _registry()["_resolve_process_group"](name)


def has_joined(name: str = ALL_RANKS) -> bool:
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


def whole_of(part: torch.Tensor, ways: int, step: int = 1) -> list[torch.Tensor]:
    """What ``ways`` ranks of the program have of a tensor, every ``step``-th one, in order; every rank must ask."""
    group = group_of(ALL_RANKS)
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group)
    return parts[: ways * step : step]


def leave(backend: str = "") -> None:
    """End the groups, of that backend alone if one is named; collectives that are under way end first."""
    if backend and not (dist.is_initialized() and dist.get_backend() == backend):
        return
    memory = sys.modules.get("torch.distributed._symmetric_memory")
    if memory is not None and vars(memory).pop("kimigraph_rooms", None):  # of kernels that exchange words
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.destroy_process_group()


def _registry() -> dict[str, Any]:
    """torch's registry of groups by name, which its functional collectives read."""
    return vars(import_module("torch._C._distributed_c10d"))
