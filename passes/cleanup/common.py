"""Common subexpressions: a pure node whose like stands earlier becomes that one."""

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from kimigraph.ir.purity import is_pure, storage_root
from kimigraph.passes.cleanup.storage import StorageFacts
from kimigraph.passes.fingerprint import argument_key
from kimigraph.passes.gate import allow_all


def merge_common(graph: Graph, allow: Callable[[str], bool] = allow_all) -> int:
    """Merge equal pure nodes in place; returns how many went.

    Two nodes are equal when operator and arguments are, literals by type and bits. They stay apart when a storage that
    they read is written between them, when their own is written, and when both end in outputs: the caller may write
    into one and must not find it in the other. Random numbers are never pure, so never merged.
    """
    facts = StorageFacts.of(graph)
    identity = {node: node.name for node in graph.nodes}
    seen: dict[Any, Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_pure(node):
            continue
        key = node.target, argument_key(node.args, identity), argument_key(node.kwargs, identity)
        first = seen.setdefault(key, node)
        if first is node:
            continue
        if not _may_share(first, node, facts):
            seen[key] = node
            continue
        if not allow(f"merge {node.name} into {first.name}"):
            continue
        facts.replace(node, first)
        node.replace_all_uses_with(first)
        graph.erase_node(node)
        merged += 1
    return merged


def _may_share(first: Node, node: Node, facts: StorageFacts) -> bool:
    if any(facts.written_between(value, first, node) for value in first.all_input_nodes):
        return False
    if facts.written_after(first, first) or facts.written_after(node, first):
        return False
    if storage_root(first) is storage_root(node):
        return not (first in facts.outputs and node in facts.outputs)
    return not (facts.escapes(first) and facts.escapes(node))
