"""What a node writes, what it aliases, and whether it may be dropped: read from operator schemas.

``torch.fx`` answers these questions wrongly both ways: its dead-code elimination deletes ``buffer.copy_()`` spelled as
a method, keeps an attention without dropout because its schema is tagged as random, and holds every module call pure.
"""

import operator
from typing import Any

from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir import schemas


def is_pure(node: Node) -> bool:
    """Whether the node does nothing but compute its result, so that it may go when nothing uses it.

    False for writes, random numbers, assertions, collectives, placeholders and the output. Attention and dropout that
    drop nothing are pure. A region is pure when all its nodes are. Two equal pure calls give equal results when no
    argument is written between them (``mutation_between``) and neither result is written later.
    """
    if node.op == "get_attr":
        return True
    if node.op == "call_method":
        return not schemas.method_writes_self(str(node.target))
    if node.op == "call_module":
        child = region_module(node)
        return child is not None and all(is_pure(n) or n.op in ("placeholder", "output") for n in child.graph.nodes)
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return schemas.is_pure_call(node, node.target)
    return schemas.is_plain_function(node.target)


def has_effect(node: Node) -> bool:
    """Whether the node communicates, draws random numbers or asserts, whatever it writes: such nodes keep their order.

    A function of unknown behaviour is held to; a region has an effect when one of its nodes has.
    """
    if node.op == "call_module":
        child = region_module(node)
        return child is None or any(has_effect(inner) for inner in child.graph.nodes)
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return schemas.has_effect(node, node.target)
    return not schemas.is_plain_function(node.target) and not schemas.writes_first_argument(node.target)


def mutated_arguments(node: Node) -> list[Node]:
    """The argument nodes whose storage this call writes, in schema order.

    A function of unknown behaviour (no schema, not a Python builtin) is held to write all its arguments.
    """
    if node.op == "call_method":
        return list(schemas.nodes_in(node.args[0])) if schemas.method_writes_self(str(node.target)) else []
    if node.op == "call_module":
        return _mutated_by_region(node)
    if node.op != "call_function":
        return []
    if isinstance(node.target, OpOverload):
        if not node.target._schema.is_mutable:
            return []
        written = schemas.written_arguments(node.target)
        return [found for name in written for found in schemas.nodes_in(schemas.argument(node, name))]
    if schemas.writes_first_argument(node.target):
        return list(schemas.nodes_in(node.args[0]))
    return [] if schemas.is_plain_function(node.target) else list(node.all_input_nodes)


def storage_root(node: Node, known: dict[Node, Node] | None = None) -> Node:
    """The placeholder or producing node whose storage ``node`` shares.

    Views and in-place results are walked through, ``getitem`` of several results and regions too. An operator that
    returns a view only sometimes (``reshape``, ``contiguous``, ``to``) counts as a view. Whoever asks for many nodes of
    a graph that does not change meanwhile hands in ``known``, a dict that starts empty: a buffer that is written a
    thousand times is a chain of a thousand nodes, and each is then walked once.
    """
    known = {} if known is None else known
    walked: list[Node] = []
    while node not in known:
        walked.append(node)
        source = _alias_source(node, 0)
        if source is None:
            known[node] = node
        else:
            node = source
    root = known[node]
    known.update(dict.fromkeys(walked, root))
    return root


def alias_source(node: Node) -> Node | None:
    """The node whose storage the (first) result of ``node`` may share, one step up; None when it owns its storage."""
    return _alias_source(node, 0)


def mutation_between(graph: Graph, root: Node, first: Node, last: Node) -> Node | None:
    """The first node strictly between ``first`` and ``last`` that writes into the storage of ``root``, or None.

    ``first`` must stand before ``last`` in the graph; ValueError otherwise.
    """
    known: dict[Node, Node] = {}
    storage = storage_root(root, known)
    found = None
    node = first.next
    while node is not last:
        if node.op == "root":
            raise ValueError(f"node {first.name} does not stand before {last.name} in the graph")
        if found is None and any(storage_root(written, known) is storage for written in mutated_arguments(node)):
            found = node
        node = node.next
    return found


def written_between(first: Node, last: Node) -> set[Node]:
    """The storages that nodes strictly between ``first`` and ``last`` write, by ``storage_root``."""
    known: dict[Node, Node] = {}
    found: set[Node] = set()
    node = first.next
    while node is not last:
        found |= {storage_root(written, known) for written in mutated_arguments(node)}
        node = node.next
    return found


def dead_code(graph: Graph) -> int:
    """Erase pure nodes that nothing uses; returns how many went. Placeholders, writes and assertions stay."""
    erased = 0
    for node in reversed(graph.nodes):
        if not node.users and is_pure(node):
            graph.erase_node(node)
            erased += 1
    return erased


def region_module(node: Node) -> GraphModule | None:
    """The child graph module that a call_module node runs, or None when it calls something else."""
    owner: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        owner = getattr(owner, part, None)
    return owner if isinstance(owner, GraphModule) else None


def _alias_source(node: Node, result: int) -> Node | None:
    """The node whose storage item ``result`` of ``node`` shares, or None when the node owns its storage."""
    if node.op == "call_method":
        shares = schemas.method_shares_storage(str(node.target))
        return next(schemas.nodes_in(node.args[0]), None) if shares else None
    if node.op == "call_module":
        return _region_alias(node, result)
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        container, index = node.args[0], node.args[1]
        if not isinstance(container, Node):
            return None
        return _alias_source(container, index if isinstance(index, int) else 0) if _is_list(container) else container
    if isinstance(node.target, OpOverload):
        name = schemas.aliased_argument(node.target, result)
        return None if name is None else next(schemas.nodes_in(schemas.argument(node, name)), None)
    return next(schemas.nodes_in(node.args[0]), None) if schemas.writes_first_argument(node.target) else None


def _is_list(node: Node) -> bool:
    if "val" in node.meta:
        return isinstance(node.meta["val"], list | tuple)
    if isinstance(node.target, OpOverload):
        return schemas.returns_list(node.target)
    return node.op == "call_module"


def _region_alias(node: Node, result: int) -> Node | None:
    child = region_module(node)
    if child is None:
        return None
    output = next(iter(reversed(child.graph.nodes))).args[0]
    outputs = output if isinstance(output, list | tuple) else (output,) * (result + 1)
    value = outputs[result] if result < len(outputs) else None  # one that writes and nothing else returns ()
    root = storage_root(value) if isinstance(value, Node) else None
    return _outer_argument(node, child, root) if root is not None and root.op == "placeholder" else None


def _mutated_by_region(node: Node) -> list[Node]:
    child = region_module(node)
    if child is None:
        return list(node.all_input_nodes)
    known: dict[Node, Node] = {}
    roots = {storage_root(written, known) for inner in child.graph.nodes for written in mutated_arguments(inner)}
    outer = (_outer_argument(node, child, inner) for inner in child.graph.nodes if inner in roots)
    return [argument for argument in outer if argument is not None]


def _outer_argument(node: Node, child: GraphModule, inner: Node) -> Node | None:
    """The argument of the call that the child's placeholder ``inner`` stands for; None when it is no placeholder."""
    placeholders = [n for n in child.graph.nodes if n.op == "placeholder"]
    argument = node.args[placeholders.index(inner)] if inner in placeholders else None
    return argument if isinstance(argument, Node) else None
