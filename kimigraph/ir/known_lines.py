"""Lines of a printed program that are as they were when it was printed before: most of them, from pass to pass."""

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

_TOLD = ("val", "stream", "waits", "buffer", "selects", "replaces")
"""What of a node's meta a line tells."""


class KnownLines:
    """Lines by node, each with all that it was made of. Arguments and metas are compared by identity.

    One object is for the states of one program, as it goes through the passes.
    """

    def __init__(self) -> None:
        self._names: dict[Node, str] = {}
        self._lines: dict[Node, tuple[tuple[Any, ...], list[Node], str]] = {}

    def begin(self, names: Mapping[Node, str]) -> None:
        """Note the variables of a function that is about to be printed; with another name lines are made anew."""
        known = self._names
        if any(known.get(node, name) != name for node, name in names.items()):
            self._lines.clear()
        known.update(names)

    def line(self, node: Node, dying: Sequence[Node], make: Callable[[], str]) -> str:
        """The line of ``node``, behind which the variables ``dying`` are no more; from ``make`` where it is not known.

        Lines that tell of other nodes than their arguments (writes, calls of regions) are always made.
        """
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
            return make()
        meta = node.meta
        facts = (node.target, node.args, node.kwargs, bool(node.users), *[meta.get(name) for name in _TOLD])
        known = self._lines.get(node)
        if known is not None and all(map(is_, facts, known[0])) and known[1] == dying:
            return known[2]
        text = make()
        self._lines[node] = facts, list(dying), text
        return text
