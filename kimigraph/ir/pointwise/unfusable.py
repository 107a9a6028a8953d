"""Why a group of nodes is no kernel."""

from torch.fx import Node


class Unfusable(Exception):
    """These nodes cannot be one kernel: ``reason`` for people, ``node`` at fault."""

    def __init__(self, reason: str, node: Node) -> None:
        super().__init__(f"{reason} (at {node.name})")
        self.reason = reason
        self.node = node
