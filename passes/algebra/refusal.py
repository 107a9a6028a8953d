"""Why a rule does not apply: data for a remark, raised through the depths of a check."""

from collections.abc import Iterable

from torch._ops import OpOverload
from torch.fx import Node

from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.remarks import Remark
from kimigraph.passes.algebra.remedies import remedy_for


class Refused(Exception):
    """A rule cannot apply: ``reason`` for people, ``node`` at fault.

    ``score`` counts the evidence that held before, ``matched`` holds its nodes where they are known.
    """

    def __init__(self, reason: str, node: Node, score: int = 0, matched: Iterable[Node] = ()) -> None:
        super().__init__(f"{reason} (at {node.name})")
        self.reason = reason
        self.node = node
        self.score = score
        self.matched = tuple(matched)

    def raised_to(self, score: int, matched: Iterable[Node] = ()) -> "Refused":
        """The same refusal with at least that score, and with that evidence when it names none itself."""
        return Refused(self.reason, self.node, max(score, self.score), self.matched or matched)

    def remark(self, pass_name: str, anchor: Node) -> Remark:
        """The missed remark of a rule whose site is ``anchor``."""
        return Remark(
            kind="missed",
            pass_name=pass_name,
            message=f"{anchor.name}: {self.reason}",
            node=self.node.name,
            source=source_line(self.node) or source_line(anchor),
            nodes=(anchor.name,),
            score=self.score,
            matched=_evidence((anchor, *self.matched)),
            remedy=remedy_for(self.reason),
            module=module_path(self.node) or module_path(anchor),
        )


def _evidence(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Each node once, as ``node (operator)``."""
    return tuple(dict.fromkeys(f"{node.name} ({_operator(node)})" for node in nodes))


def _operator(node: Node) -> str:
    if isinstance(node.target, OpOverload):
        return node.target.overloadpacket.__name__
    return node.op if isinstance(node.target, str) else getattr(node.target, "__name__", node.op)
