"""Why a rule does not apply: data for a remark, raised through the depths of a check."""

from torch.fx import Node

from kimigraph.ir.provenance import source_line
from kimigraph.ir.remarks import Remark


class Refused(Exception):
    """A rule cannot apply: ``reason`` for people, ``node`` at fault, ``score`` = evidence that held before."""

    def __init__(self, reason: str, node: Node, score: int = 0) -> None:
        super().__init__(f"{reason} (at {node.name})")
        self.reason = reason
        self.node = node
        self.score = score

    def raised_to(self, score: int) -> "Refused":
        """The same refusal with at least that score."""
        return Refused(self.reason, self.node, max(score, self.score))

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
        )
