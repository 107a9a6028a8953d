"""Caches updated where the model updates them: a functional graph's mutations made in-place again.

A chain of writes (``versions.trace``) may happen in place when nothing reads an old version after it was overwritten.
Otherwise the new value is computed beside the old one and copied over at the end of the step, which is always right.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from kimigraph.adapters.torch_export import FunctionalGraph, functionalized_call
from kimigraph.capture.versions import SCATTERS, Trace, Write, in_place_twin, is_view, trace, without_views

ATEN = torch.ops.aten


def reinplace(functional: FunctionalGraph) -> dict[str, str]:
    """Rewrite the graph so that its mutated placeholders change in place and it returns the results alone.

    Returns for each mutated placeholder ``in place`` or ``copied``. Functionalized custom operators become plain calls.
    """
    graph = functional.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    order = {node: place for place, node in enumerate(graph.nodes)}
    for name, value in functional.mutations.items():
        functional.mutations[name] = _without_copy(value, placeholders[name], order)
    finals = {placeholders[name]: value for name, value in functional.mutations.items()}
    accepted = [found for p, value in finals.items() if (found := _legal_trace(p, value, order)) is not None]
    graph.output_node().args = (functional.results,)
    for found in accepted:
        _apply(graph, found)
    _restore_calls(graph, {node for found in accepted for node in found.versions})
    in_place = {found.placeholder for found in accepted}
    copied = {p: value for p, value in finals.items() if p not in in_place and value is not p}
    _copy_at_end(graph, copied, set(finals))
    _drop_dead_views(graph)
    return {p.name: "in place" if p in in_place or p is finals[p] else "copied" for p in finals}


def _without_copy(value: Node, placeholder: Node, order: dict[Node, int]) -> Node:
    """The new value itself where a model makes it by writes into a copy of the old one and then copies it back whole.

    Of arithmetic on a whole state nothing would be gained: there the copy stays.
    """
    if value.target is not ATEN.copy.default or value.args[0] is not placeholder:
        return value
    output, (target, made, *rest) = value.graph.output_node(), value.args
    if not isinstance(made, Node) or list(value.users) != [output]:
        return value
    listed: Any = output.args
    value.replace_all_uses_with(made)
    value.args = ()  # out of the way: neither a reader of the old value nor of the new one
    found = _legal_trace(placeholder, made, order)
    if found is None or any(write.kind == "twin" and write.node.target not in _PARTIAL for write in found.writes):
        output.args, value.args = listed, (target, made, *rest)
        return value
    value.graph.erase_node(value)
    return made


_PARTIAL = (
    ATEN.index_copy.default,
    ATEN.index_put.default,
    ATEN.scatter.src,
    ATEN.scatter.value,
    ATEN.scatter_add.default,
)
"""Writes into a part of a tensor that have an in-place twin."""


def _legal_trace(placeholder: Node, value: Node, order: dict[Node, int]) -> Trace | None:
    found = trace(value, placeholder) if value is not placeholder else None
    return found if found is not None and _is_legal(found, value, order) else None


def _is_legal(found: Trace, value: Node, order: dict[Node, int]) -> bool:
    """Whether no write of the trace destroys what is read later, and no write reads what it writes."""
    places = {write.node: order[_place(write.node)] for write in found.writes if write.kind != "joined"}
    chain = {_place(node) for node in found.versions} | set(found.versions)
    for version, region in found.versions.items():
        readers = _readers(version, chain, order, value)
        if version in places or version is found.placeholder:
            born = places.get(version, -1)
        else:
            born = max(place for place in places.values() if place < order[version])
        later = [place for place in places.values() if place > born]
        if readers and later and max(readers) >= min(later):
            return False
        if readers and not _as_captured(version, region):
            return False
    return not any(_reads_itself(write, found) for write in found.writes)


def _place(node: Node) -> Node:
    """The node that computes ``node``: the call itself where ``node`` picks one of its results."""
    call = node.args[0] if node.args else None
    return call if isinstance(call, Node) and functionalized_call(call) is not None else node


def _as_captured(node: Node, region: torch.Tensor) -> bool:
    """Whether readers of ``node`` find the strides that they were captured with."""
    captured = node.meta["val"]
    return tuple(captured.shape) == tuple(region.shape) and captured.stride() == region.stride()


def _readers(version: Node, chain: set[Node], order: dict[Node, int], value: Node) -> list[int]:
    """Places of the nodes that read a version, views looked through; the chain's own links do not count."""
    places: list[int] = []
    pending = [version]
    while pending:
        node = pending.pop()
        for user in node.users:
            if is_view(user):
                pending.append(user)
            elif user.op == "output":
                places += [order[user]] if _is_read_by_output(user, node, value) else []
            elif user not in chain:
                places.append(order[user])
    return places


def _is_read_by_output(output: Node, node: Node, value: Node) -> bool:
    """The output lists ``value`` once as the input's new value; anything more is a result or another input's value."""
    listed: Any = output.args[0]
    return sum(item is node for item in listed) > (1 if node is value else 0)


def _reads_itself(write: Write, found: Trace) -> bool:
    """Whether a write takes the memory it writes as another operand too."""
    node = write.node
    call = functionalized_call(_place(node))
    if call is not None:
        others = [item for item in call.plain.values() if isinstance(item, Node)]
        same = [base for base in call.bases if without_views(base) in found.versions]
        return len(same) > 1 or any(without_views(item) in found.versions for item in others)
    if node.target in SCATTERS:
        return write.kind == "copy" and without_views(node.args[1]) in found.versions
    others = [item for item in node.all_input_nodes if item is not node.args[0]]
    repeated = sum(item is node.args[0] for item in node.args) > 1
    return repeated or any(without_views(item) in found.versions for item in others)


def _apply(graph: Graph, found: Trace) -> None:
    for write in found.writes:
        node = write.node
        if write.kind == "twin":
            twin = in_place_twin(node)
            assert twin is not None
            node.target = twin
            continue
        if write.kind == "call":
            continue  # _restore_calls does all bases of a call at once
        base: Any = node.args[0]
        if write.kind == "copy":
            with graph.inserting_before(node):
                part = graph.call_function(SCATTERS[node.target], (base, *node.args[2:]))
                part.meta = {**node.meta, "val": SCATTERS[node.target](base.meta["val"], *node.args[2:])}
                _new_copy(graph, part, node.args[1])
        node.replace_all_uses_with(base)
        graph.erase_node(node)


def _new_copy(graph: Graph, destination: Node, source: Any) -> Node:
    node = graph.call_function(ATEN.copy_.default, (destination, source))
    node.meta = {key: item for key, item in getattr(source, "meta", {}).items() if key != "val"}
    node.meta["val"] = destination.meta["val"]
    return node


def _restore_calls(graph: Graph, in_place: set[Node]) -> None:
    """Each functionalized custom operator as the call it was; bases that must keep their value are cloned first."""
    for node in list(graph.nodes):
        call = functionalized_call(node)
        if call is None:
            continue
        news = {int(str(user.args[1])): user for user in node.users}
        bases: list[Node] = []
        with graph.inserting_before(node):
            for index, base in enumerate(call.bases):
                keep = news.get(call.results + index) in in_place
                bases.append(base if keep else _derived(graph, ATEN.clone.default, base, ()))
            written: dict[str, Any] = {}
            for name, argument in call.written.items():
                base = bases[argument.base]
                written[name] = (
                    base if argument.region is None else _derived(graph, argument.region[0], base, argument.region[1])
                )
            new = graph.call_function(call.operator, (), {**call.plain, **written})
            _positional(new, call.operator)
        new.meta = {key: item for key, item in node.meta.items() if key != "val"}
        _replace_results(graph, node, new, bases, call.results, len(call.operator._schema.returns))


def _derived(graph: Graph, target: Any, base: Node, rest: tuple[Any, ...]) -> Node:
    node = graph.call_function(target, (base, *rest))
    node.meta = {**base.meta, "val": target(base.meta["val"], *rest)}
    return node


def _positional(node: Node, target: Any) -> None:
    """Arguments in schema order, keyword-only ones by name."""
    given = dict(node.kwargs)
    args: list[Any] = []
    for argument in target._schema.arguments:
        if argument.kwarg_only or argument.name not in given:
            break
        args.append(given.pop(argument.name))
    node.args, node.kwargs = tuple(args), given


def _replace_results(graph: Graph, old: Node, new: Node, bases: list[Node], results: int, returns: int) -> None:
    values: Any = old.meta["val"]
    new.meta["val"] = values[0] if returns == 1 else tuple(values[:returns])
    for user in list(old.users):
        index = int(str(user.args[1]))
        if index >= results:
            user.replace_all_uses_with(bases[index - results])
        elif returns == 1:
            user.replace_all_uses_with(new)
        else:
            user.args = (new, index)
            continue
        graph.erase_node(user)
    graph.erase_node(old)


def _copy_at_end(graph: Graph, copied: dict[Node, Node], mutated: set[Node]) -> None:
    """Copy the new values over the old ones, after everything else was computed."""
    output = graph.output_node()
    leaves: Any = output.args[0]
    results: list[Any] = list(leaves)
    with graph.inserting_before(output):
        values = {p: _kept_apart(graph, value, mutated) for p, value in copied.items()}
        for place, leaf in enumerate(results):
            if without_views(leaf) in copied:  # a result that shows an input as it was
                results[place] = _derived(graph, ATEN.clone.default, leaf, ())
        copies = {copied[p]: _new_copy(graph, p, value) for p, value in values.items()}
        for place, leaf in enumerate(results):
            if without_views(leaf) in copies:  # a result that is the updated input, or a view of it
                results[place] = _rebuild(graph, leaf, copies)
    output.args = (tuple(results),)


def _kept_apart(graph: Graph, value: Node, mutated: set[Node]) -> Node:
    """``value``, cloned when it is the memory of an input that a copy may overwrite first."""
    root = without_views(value)
    return _derived(graph, ATEN.clone.default, value, ()) if root in mutated else value


def _rebuild(graph: Graph, leaf: Node, copies: dict[Node, Node]) -> Node:
    if leaf in copies:
        return copies[leaf]
    base: Any = leaf.args[0]
    view: Any = leaf.target
    rebuilt = _rebuild(graph, base, copies)
    node = graph.call_function(view, (rebuilt, *leaf.args[1:]), dict(leaf.kwargs))
    node.meta = dict(leaf.meta)
    return node


def _drop_dead_views(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if is_view(node) and not node.users:
            graph.erase_node(node)
