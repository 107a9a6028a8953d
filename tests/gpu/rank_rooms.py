"""Kernels of several ranks on one GPU: each rank is a stream, with a room in its memory."""

from collections.abc import Callable
from typing import Any

import torch


class RankRooms:
    """What the kernels of ``ways`` ranks keep between rounds: rooms, their addresses, and how many rounds were."""

    def __init__(self, constants: dict[str, Any], programs: int, ways: int) -> None:
        self.none = constants["NONE"]
        size = 2 * (ways - 1) * (constants["WORDS"] + 3)
        self.rooms = [torch.full((size,), self.none, dtype=torch.int32, device="cuda") for _ in range(ways)]
        places = [room.data_ptr() for room in self.rooms]
        self.peers = [torch.tensor([*places, rank], dtype=torch.int64, device="cuda") for rank in range(ways)]
        self.rounds = [torch.zeros(programs, dtype=torch.int32, device="cuda") for _ in range(ways)]
        self.streams = [torch.cuda.Stream() for _ in range(ways)]

    def meet(self, launch: Callable[[int], Any], late: int | None = None) -> None:
        """One launch of every rank, the rank ``late`` behind the others."""
        torch.cuda.synchronize()
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                if rank == late:
                    torch.cuda._sleep(2_000_000)
                launch(rank)
        torch.cuda.synchronize()

    def captured(self, rank: int, steps: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """A graph of what a rank does."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.streams[rank]):
            steps()
        return graph

    def replay(self, graphs: list[torch.cuda.CUDAGraph], times: int = 1) -> None:
        """All ranks' graphs beside one another."""
        for _ in range(times):
            for stream, graph in zip(self.streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        torch.cuda.synchronize()

    def cleared(self) -> bool:
        """Whether every word that was left has been read."""
        return all(bool((room == self.none).all()) for room in self.rooms)
