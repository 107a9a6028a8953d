"""A step without its collectives: they give again what they gave once, so that all else works on the same data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from kimigraph.ir.mesh import COLLECTIVES
from kimigraph.runtime.executor import Executor, load_program

COMMUNICATING = ("rank_sum", "rank_gather", "exchange_picks")
"""Kernels in which ranks write into one another's memory."""
Step = Callable[[], Any]


def without_communication(executor: Executor, directory: Path, given: list[torch.Tensor]) -> Step:
    """The step of the program of ``directory``, which all ranks must ask for: it is run once with collectives."""
    program: Any = load_program(directory)
    kept = _Kept()
    for name, launch in vars(program.kernels).items():
        if name.startswith(COMMUNICATING):
            vars(program.kernels)[name] = kept.of(launch)
    own, executor.step = executor.step, program.step
    with kept:
        executor(*given)
    executor.step = own

    def step() -> Any:
        executor.step = program.step
        with kept.again():
            found = executor(*given)
        executor.step = own
        return found

    return step


class _Kept(TorchDispatchMode):
    """What collectives gave, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self._results: list[Any] = []
        self._next: int | None = None
        self._within = False

    def again(self) -> "_Kept":
        """This, from the first collective on, giving what there is."""
        self._next = 0
        return self

    def of(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        """The launch, or what it gave."""
        return lambda *args, **kwargs: self._kept(lambda: launch(*args, **kwargs))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.namespace != COLLECTIVES:
            return func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "wait_tensor":  # waited for as soon as it began
            return args[0]
        wait = getattr(torch.ops, COLLECTIVES).wait_tensor.default
        return self._kept(lambda: wait(func(*args, **(kwargs or {}))))

    def _kept(self, run: Callable[[], Any]) -> Any:
        if self._within:  # a launch that leaves the collective to the library
            return run()
        if self._next is None:
            self._within = True
            found = run()
            self._within = False
            self._results.append(tree_map(torch.clone, found))
            return found
        self._next += 1
        return self._results[self._next - 1]
