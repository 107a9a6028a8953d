"""What carries values from one stage of a pipeline to the next: torch.distributed, or queues of one process."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from kimigraph.ir import ranks
from kimigraph.ir.errors import CompileError
from kimigraph.ir.mesh import PP_GROUP

Wait = Callable[[], None]
"""Ends when what was begun is done; on a GPU the current stream waits, not the process."""


class Links(Protocol):
    """The stage before and the one behind."""

    def post(self, tensors: Sequence[Tensor]) -> Wait:
        """Make room for the next message from the stage before: it is written into ``tensors``."""
        ...

    def send(self, tensors: Sequence[Tensor]) -> Wait:
        """Send a message to the stage behind; ``tensors`` must stay as they are until the wait is over."""
        ...


class GroupLinks:
    """Point-to-point messages of torch.distributed between neighbours of a process group (NCCL, or Gloo)."""

    def __init__(self, name: str = PP_GROUP) -> None:
        self._group, self._rank = ranks.group_of(name), ranks.rank_in(name)

    def post(self, tensors: Sequence[Tensor]) -> Wait:
        """See ``Links``."""
        return self._begin(dist.irecv, tensors, self._rank - 1)

    def send(self, tensors: Sequence[Tensor]) -> Wait:
        """See ``Links``."""
        return self._begin(dist.isend, tensors, self._rank + 1)

    def _begin(self, operation: Callable[..., Any], tensors: Sequence[Tensor], peer: int) -> Wait:
        if not tensors:
            return _nothing
        operations = [
            dist.P2POp(operation, tensor.view(-1).view(torch.uint8), group=self._group, group_peer=peer)
            for tensor in tensors
        ]
        works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            for work in works:
                work.wait()

        return wait


class QueueLinks:
    """The same between stages that one process runs in turn: ``before`` and ``behind`` hold messages on their way."""

    def __init__(self, before: deque[list[Tensor]], behind: deque[list[Tensor]]) -> None:
        self._before, self._behind = before, behind

    def post(self, tensors: Sequence[Tensor]) -> Wait:
        """See ``Links``. CompileError where nothing has been sent when the message is waited for."""

        def wait() -> None:
            if not self._before:
                raise CompileError("a stage waits for a message that the stage before it has not sent")
            for tensor, sent in zip(tensors, self._before.popleft(), strict=True):
                tensor.copy_(sent)

        return wait

    def send(self, tensors: Sequence[Tensor]) -> Wait:
        """See ``Links``."""
        self._behind.append([tensor.clone() for tensor in tensors])
        return _nothing


def queue_links(stages: int) -> list[QueueLinks]:
    """The links of all stages of a pipeline in one process."""
    queues = [deque[list[Tensor]]() for _ in range(stages + 1)]
    return [QueueLinks(before, behind) for before, behind in pairwise(queues)]


def _nothing() -> None:
    """Nothing to wait for."""
