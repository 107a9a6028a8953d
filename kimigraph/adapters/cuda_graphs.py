"""Capture and replay of CUDA graphs on one device, in an order that is safe whatever stream a caller uses."""

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Turn:
    """``with turn:`` orders what it holds behind what the block before it queued, on whatever stream that was.

    One for a device: graphs replay one after the other, so that they may share memory (a pool, the state of a kernel,
    the work space of a library).
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.RLock()
        self._ended = torch.cuda.Event()
        self._stream: Any = None

    def __enter__(self) -> None:
        self._lock.acquire()
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_event(self._ended)
        self._stream = stream

    def __exit__(self, *error: object) -> None:
        try:
            self._ended.record(self._stream)
        finally:
            self._lock.release()


@cache
def _turn(index: int) -> Turn:
    return Turn(torch.device("cuda", index))


class CudaGraphs:
    """The graphs of one owner: they share a memory pool, and are captured on a stream of their own.

    ``turn`` is the device's; a replay belongs inside it.
    """

    def __init__(self, device: torch.device) -> None:
        self.turn = _turn(device.index)
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)
        self._pool: Any = None
        self._made: list[weakref.ref[Any]] = []

    def capturing(self) -> bool:
        """Whether the caller captures a graph of its own on the current stream."""
        return torch.cuda.is_current_stream_capturing()

    def capture(self, call: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """What ``call`` queues, as a function that queues it again on the current stream, and the call's result.

        Nothing runs on the device. ``call`` has run before, so that what it does once is done. An exception of it
        comes out as it is, with the device as it was before.
        """
        torch.cuda.synchronize(self._device)
        graph: Any = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # what a collection would destroy now may not be destroyed during a capture
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._live_pool(), capture_error_mode="thread_local")
                try:
                    result = call()
                except BaseException:
                    self._abandon(graph)
                    raise
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        self._made.append(weakref.ref(graph))
        return graph.replay, result

    def _live_pool(self) -> Any:
        """The pool of the graphs that there are, or a new one: torch takes no capture into a pool whose graphs went."""
        self._made = [known for known in self._made if known() is not None]
        if not self._made:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def _abandon(self, graph: Any) -> None:
        """End a capture that failed: torch leaves the pool open then, and random numbers as if the capture went on."""
        with suppress(Exception):
            graph.capture_end()
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        self._made.clear()  # the next capture takes a new pool
        with suppress(Exception):
            mended: Any = torch.cuda.CUDAGraph()
            one = torch.ones(1, device=self._device)
            mended.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            one.mul_(1)
            mended.capture_end()
