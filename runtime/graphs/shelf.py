"""The graphs of one owner, by when they were used: how many are kept, and the messages about them."""

import warnings
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from kimigraph.ir.errors import UsageError

REMARKS = 100
Outputs = tuple[torch.Tensor, ...]
Key = tuple[int, tuple[int, ...]]
"""A program's number, and the addresses that its graph is over."""


class GraphModeWarning(UserWarning):
    """Graph mode works, but not as well as it could: too few graphs are kept, or caches move with every step."""


class GraphDevice(Protocol):
    """What captures and replays (``kimigraph.adapters.cuda_graphs`` on a GPU)."""

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """Orders what one block queues behind the block before it."""
        ...

    def capturing(self) -> bool:
        """Whether the caller captures a graph of its own."""
        ...

    def capture(self, call: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """What ``call`` queues, as a function that queues it again, and the call's result."""
        ...


class Shelf:
    """At most ``most`` graphs of several programs; the one used longest ago goes first."""

    def __init__(self, device: GraphDevice, most: int, reuse_outputs: bool) -> None:
        if most < 1:
            raise UsageError(f"max_graphs is {most}; graph mode keeps at least 1")
        self.device, self.most, self.reuse_outputs = device, most, reuse_outputs
        self.remarks: deque[str] = deque(maxlen=REMARKS)
        self._drops: OrderedDict[Key, Callable[[], str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._drops)

    def make_room(self) -> None:
        """Drop what was used longest ago, so that one more may come."""
        while len(self._drops) >= self.most:
            _, drop = self._drops.popitem(last=False)
            self.warn(
                f"graph mode keeps {self.most} CUDA graphs, and one more was wanted: the one used longest ago "
                f"({drop()}) goes. Raise max_graphs where shapes or caches alternate"
            )

    def add(self, key: Key, drop: Callable[[], str]) -> None:
        """A new graph, used just now; ``drop`` lets go of it and says whose it was."""
        self._drops[key] = drop

    def note_use(self, key: Key) -> None:
        """The graph was used just now."""
        self._drops.move_to_end(key)

    def forget(self, program: int) -> None:
        """Drop the graphs of one program."""
        for key in [key for key in self._drops if key[0] == program]:
            self._drops.pop(key)()

    def warn(self, message: str) -> None:
        """A remark that the user should see."""
        self.remarks.append(message)
        warnings.warn(message, GraphModeWarning, stacklevel=2)
