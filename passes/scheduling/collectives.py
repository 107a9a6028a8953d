"""What must hold of a program's collectives, whatever has been moved: one order, waits, and inputs left alone."""

from collections.abc import Iterator
from itertools import pairwise

from torch.fx import Graph, Node

from kimigraph.ir.collectives import NUMBER, collectives, is_start, is_wait, reads_until_wait
from kimigraph.ir.purity import mutated_arguments, storage_root
from kimigraph.ir.schedule import HappensBefore, buffer_of, stream_of
from kimigraph.passes.scheduling.races import Violation

_REMEDY = "--disable-pass overlap-communication leaves collectives where they stood; report it with the model"


def communication_violations(graph: Graph, order: HappensBefore) -> Iterator[Violation]:
    """Collectives that ranks would not begin in the recorded order, that nobody waits for before their result is used,
    or of which the input may be written while they read it."""
    yield from _out_of_order(graph)
    known: dict[Node, Node] = {}
    writes = [
        (node, storage_root(written, known))
        for node in graph.nodes
        if not is_start(node)
        for written in mutated_arguments(node)
    ]
    for node in graph.nodes:
        if is_start(node):
            yield from _unwaited(node)
            yield from _written_meanwhile(node, writes, order, known)


def _out_of_order(graph: Graph) -> Iterator[Violation]:
    found = [node for node in collectives(graph) if NUMBER in node.meta]
    for first, second in pairwise(found):
        if first.meta[NUMBER] >= second.meta[NUMBER]:
            yield Violation(
                second,
                f"{first.name} (collective {first.meta[NUMBER]}) begins before {second.name} (collective "
                f"{second.meta[NUMBER]}): every rank must begin them in the order of their numbers, or all wait for "
                "one another",
                _REMEDY,
                first,
            )


def _unwaited(node: Node) -> Iterator[Violation]:
    waits = [user for user in node.users if is_wait(user)]
    for user in node.users:
        if not is_wait(user) and user.op != "output":
            yield Violation(
                user, f"{user.name} uses what {node.name} communicates, and no wait stands between", _REMEDY, node
            )
    if not waits:
        yield Violation(node, f"nothing waits for {node.name}, so that its memory may go while ranks use it", _REMEDY)


def _written_meanwhile(
    start: Node, writes: list[tuple[Node, Node]], order: HappensBefore, known: dict[Node, Node]
) -> Iterator[Violation]:
    """What is read where it lies until the wait must neither be written before it nor lie in the arena."""
    if not reads_until_wait(start):
        return
    waits = [user for user in start.users if is_wait(user)]
    roots = {storage_root(item, known) for item in start.all_input_nodes}
    for node, root in writes:
        if root in roots and start < node and not any(_is_behind(order, wait, node) for wait in waits):
            yield Violation(
                node,
                f"{node.name} (stream {stream_of(node)}) writes {root.name} while {start.name} reads it: it must come "
                f"behind {', '.join(wait.name for wait in waits) or 'a wait'}",
                _REMEDY,
                start,
            )
    for root in roots:
        if buffer_of(root) is not None:
            yield Violation(
                start,
                f"{root.name} lies in the arena and {start.name} reads it until its wait, which no lifetime knows",
                "--disable-pass plan-memory compiles without an arena",
                root,
            )


def _is_behind(order: HappensBefore, wait: Node, node: Node) -> bool:
    return wait in order.places and node in order.places and order.ordered(wait, node)
