"""Branches that a pass keeps apart: ``meta["branch"]`` says which one a node belongs to, absent: to none."""

from collections.abc import Iterable

from torch.fx import Node


def branch_of(node: Node) -> str:
    """The branch that the node belongs to; empty when it belongs to none."""
    return str(node.meta.get("branch", ""))


def common_branch(nodes: Iterable[Node]) -> str | None:
    """The one branch that ``nodes`` belong to, nodes of none aside (empty: all of none); None when there are several.

    What becomes one kernel must have one: a kernel of two branches would make each wait for what the other waits for.
    """
    found = {branch_of(node) for node in nodes} - {""}
    return None if len(found) > 1 else next(iter(found), "")
