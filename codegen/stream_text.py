"""Several streams in ``program.py``: which block a statement stands in, what it waits for, what is kept until the join.

``assign-streams`` leaves two things at a node: ``meta["stream"]``, a number (absent or 0: the caller's stream), and
``meta["waits"]``, the names of nodes on other streams that it must wait for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from kimigraph.ir.errors import CompileError
from kimigraph.ir.purity import storage_root
from kimigraph.ir.schedule import stream_of, waits_of

STREAMS_FILE = "support/streams.py"


def stream_count(nodes: Iterable[Node]) -> int:
    """How many streams a program has: one more than the largest number."""
    return 1 + max((stream_of(node) for node in nodes), default=0)


@dataclass(frozen=True)
class StreamText:
    """The lines that streams add to a body; a program of one stream gets none.

    ``waits`` has the variables that a node waits for, ``recorded`` the nodes that others wait for. Tensors of ``held``
    are touched by several streams: freed earlier than at the join, their memory could be taken by one stream while
    another still reads it.
    """

    count: int = 1
    waits: Mapping[Node, Sequence[str]] = field(default_factory=lambda: {})
    recorded: Mapping[Node, str] = field(default_factory=lambda: {})
    held: frozenset[Node] = frozenset()

    def fork(self) -> list[str]:
        """The first statement of the step."""
        return [f"    lanes = streams.fork(DEVICE, {self.count})"] if self.count > 1 else []

    def join(self) -> list[str]:
        """The last statement before the return."""
        return ["    lanes.join()"] if self.count > 1 else []

    def enter(self, stream: int, indent: str) -> list[str]:
        """The head of a block on ``stream``; the caller's needs none."""
        return [f"{indent}with lanes[{stream}]:"] if stream else []

    def before(self, node: Node, indent: str) -> list[str]:
        """What ``node`` waits for."""
        names = ", ".join(f'"{name}"' for name in self.waits.get(node, ()))
        return [f"{indent}lanes.wait({names})"] if names else []

    def after(self, node: Node, indent: str) -> list[str]:
        """The event that says that ``node`` is computed."""
        return [f'{indent}lanes.record("{self.recorded[node]}")'] if node in self.recorded else []


def stream_text(nodes: Sequence[Node], names: Mapping[Node, str]) -> StreamText:
    """The streams of a graph in program order. CompileError where a node waits for one that is not queued before it."""
    count = stream_count(nodes)
    if count == 1:
        return StreamText()
    waits: dict[Node, list[str]] = {}
    recorded: dict[Node, str] = {}
    queued: dict[str, Node] = {}
    for node in nodes:
        wanted = () if node.op == "output" else waits_of(node)  # the join waits for all
        for name in dict.fromkeys(wanted):
            source = queued.get(name)
            if source is None:
                raise CompileError(
                    f"{node.name} on stream {stream_of(node)} waits for {name}, which the program has not queued "
                    "before it: the schedule is wrong; compile with --disable-pass assign-streams and report it"
                )
            if source.op != "placeholder" and stream_of(source) != stream_of(node):
                recorded[source] = names[source]
                waits.setdefault(node, []).append(names[source])
        queued[node.name] = node
    return StreamText(count, waits, recorded, _held(nodes))


def _held(nodes: Sequence[Node]) -> frozenset[Node]:
    """The nodes of which the memory is touched by more than one stream."""
    known: dict[Node, Node] = {}
    touched: dict[Node, set[int]] = {}
    for node in nodes:
        if node.op != "placeholder":
            for used in (node, *node.all_input_nodes):
                touched.setdefault(storage_root(used, known), set()).add(stream_of(node))
    return frozenset(node for node in nodes if len(touched.get(storage_root(node, known), ())) > 1)
