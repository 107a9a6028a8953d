"""Known calls: a call that looks like an earlier one goes to its program without being taken apart again.

What is compared is all that a program depends on: structure, plain values, and of each tensor its type, device, dtype,
sizes, strides and whether it lies at a multiple of 16 bytes. A call that is not known this way takes the long road; it
may lead to the same program.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kimigraph.adapters.tensor_guard import Guard, tensor_guard
from kimigraph.runtime.calls import CallStructure
from kimigraph.runtime.executor import ALIGNMENT, Executor

Match = Callable[[Any, list[Any]], bool]
"""Whether a value has a known structure; its tensors go into the list, in order."""


class KnownCall:
    """One call that a program served as it was given: no argument was copied or converted."""

    def __init__(
        self, match: Match, guard: Guard, order: Sequence[int], executor: Executor, calls: CallStructure
    ) -> None:
        self._match, self._guard = match, guard
        self._executor, self._calls = executor, calls
        self._template, places = executor.argument_template()
        self._moves = tuple(zip(places, order, strict=True))
        self._aligned = executor.device.type == "cuda"

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """The arguments of the step for a call like the known one; None for another."""
        given: list[Any] = []
        if not self._match((args, kwargs), given) or not self._guard(*given):
            return None
        if self._aligned and not _all_aligned(given):
            return None
        arguments = self._template.copy()
        for place, source in self._moves:
            arguments[place] = given[source]
        return arguments

    def step(self, arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The program alone, on ``arguments``."""
        return self._executor.step(*arguments)

    def run(self, arguments: list[torch.Tensor]) -> Any:
        """One step on ``arguments``, its result in the model's structure."""
        return self._calls.returned(self._executor.run(arguments))


def _all_aligned(tensors: list[torch.Tensor]) -> bool:
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % ALIGNMENT == 0


def know(args: tuple[Any, ...], kwargs: dict[str, Any], executor: Executor, calls: CallStructure) -> KnownCall | None:
    """The call as a known one; None where it cannot be recognised by looking at it.

    That is so for containers other than tuples, lists and dicts, tensors given twice, and ones that the program takes
    in another layout.
    """
    leaves: list[Any] = []
    match = _matcher((args, kwargs), leaves)
    if match is None or any(type(leaf) not in (torch.Tensor, torch.nn.Parameter) for leaf in leaves):
        return None
    positions = {id(leaf): index for index, leaf in enumerate(leaves)}
    wanted = calls.tensors(args, kwargs)
    if len(positions) != len(leaves) or any(id(tensor) not in positions for tensor in wanted):
        return None
    if not executor.takes_as_given(wanted):
        return None
    return KnownCall(match, tensor_guard(leaves), [positions[id(tensor)] for tensor in wanted], executor, calls)


def _matcher(value: Any, leaves: list[Any]) -> Match | None:
    """A function that matches values of the structure of ``value``, whose tensors go into ``leaves``."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return _take
    if type(value) in (tuple, list):
        return _sequence_matcher(value, leaves)
    if type(value) is dict:
        return _dict_matcher(value, leaves)
    if value is None or type(value) in (bool, int, float, str):
        kind, text = type(value), repr(value)  # 0.0 is not -0.0, and nan is nan
        return lambda other, _: type(other) is kind and repr(other) == text
    return None


def _take(value: Any, found: list[Any]) -> bool:
    found.append(value)  # the guard looks at its type
    return True


def _sequence_matcher(value: Sequence[Any], leaves: list[Any]) -> Match | None:
    parts = [_matcher(item, leaves) for item in value]
    kind, length = type(value), len(value)
    if any(part is None for part in parts):
        return None
    matches = [part for part in parts if part is not None]

    def match(other: Any, found: list[Any]) -> bool:
        if type(other) is not kind or len(other) != length:
            return False
        for part, item in zip(matches, other, strict=True):  # a loop: a generator takes longer than what it checks
            if not part(item, found):
                break
        else:
            return True
        return False

    return match


def _dict_matcher(value: dict[Any, Any], leaves: list[Any]) -> Match | None:
    keys = list(value)
    if value and all(isinstance(item, torch.Tensor) for item in value.values()):
        leaves += value.values()

        def match_tensors(other: Any, found: list[Any]) -> bool:
            if type(other) is not dict or list(other) != keys:
                return False
            found += other.values()
            return True

        return match_tensors
    inner = _sequence_matcher(list(value.values()), leaves)
    if inner is None:
        return None
    return lambda other, found: type(other) is dict and list(other) == keys and inner(list(other.values()), found)
