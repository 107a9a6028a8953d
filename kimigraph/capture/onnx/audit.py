"""What an ONNX file must be before anything of it is allocated: the file may come from anybody."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from math import prod

from kimigraph.adapters.onnx_file import UNSAID, FileFunction, FileGraph, FileNode, OnnxFile, StoredTensor
from kimigraph.capture.onnx.external import external_fault
from kimigraph.ir.errors import UsageError

OPSETS = range(13, 25)
MOST_NODES = 10**6
MOST_BYTES = 2**36
"""What one tensor, and all inputs together, may take: beyond it a size is taken for a mistake or an attack."""
MOST_AXES = 32


def check_file(file: OnnxFile) -> OnnxFile:
    """The file with its nodes in an order in which they can run.

    UsageError that lists what is wrong with its types, sizes, names, places of external data, or order.
    """
    faults = [
        *_version_faults(file),
        *(f"it holds {what}, which no step here has" for what in file.foreign),
        *_port_faults(file),
        *_weight_faults(file),
        *_function_faults(file),
    ]
    if not faults:
        given = [port.name for port in file.inputs] + [tensor.name for tensor in file.weights]
        ordered, faults = _ordered("the graph", given, [port.name for port in file.outputs], file.nodes)
        functions: list[FileFunction] = []
        for item in file.functions:
            nodes, found = _ordered(f"function {item.name}", item.inputs, item.outputs, item.nodes)
            functions.append(replace(item, nodes=nodes))
            faults += found
        if not faults:
            file = replace(file, nodes=ordered, functions=tuple(functions))
    if faults:
        more = f", and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise UsageError(f"{file.path} is not taken: {'; '.join(faults[:8])}{more}")
    return file


def _version_faults(file: OnnxFile) -> Iterator[str]:
    opset = file.opsets.get("", 0)
    if opset not in OPSETS:
        yield f"its opset is {opset}: convert it to one of {OPSETS[0]} to {OPSETS[-1]} (onnx.version_converter)"
    for item in file.functions:
        if item.opset and item.opset not in OPSETS:
            yield f"function {item.name} is in opset {item.opset}"


def size_fault(shape: Iterable[int], itemsize: int) -> str:
    """What is wrong with a shape; empty where it can be allocated."""
    sizes = tuple(shape)
    if len(sizes) > MOST_AXES:
        return f"has {len(sizes)} axes, at most {MOST_AXES} are taken"
    if any(size < 0 for size in sizes):
        return f"has a negative size {list(sizes)}"
    if prod(sizes) * itemsize > MOST_BYTES:
        return f"{list(sizes)} takes {prod(sizes) * itemsize:.3g} bytes, at most {MOST_BYTES:.3g} are taken"
    return ""


def _port_faults(file: OnnxFile) -> Iterator[str]:
    held = {tensor.name for tensor in file.weights}
    for what, names in (("inputs", [port.name for port in file.inputs]), ("weights", [t.name for t in file.weights])):
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            yield f"two of its {what} are called '{twice[0]}'"
    total = 0
    for port in (*file.inputs, *(port for port in file.outputs if port.kind != UNSAID)):
        if port.dtype is None:
            yield f"'{port.name}' is of type {port.kind}, which no tensor here has"
    for port in file.inputs:
        if port.dtype is None or port.name in held:
            continue
        sizes = [size for size in port.shape or () if isinstance(size, int)]
        fault = size_fault(sizes, port.dtype.itemsize)
        if fault:
            yield f"input '{port.name}' {fault}"
        total += prod(sizes) * port.dtype.itemsize
    if total > MOST_BYTES:
        yield f"its inputs take {total:.3g} bytes, at most {MOST_BYTES:.3g} are taken"


def _weight_faults(file: OnnxFile) -> Iterator[str]:
    for tensor in file.weights:
        fault = tensor_fault(file, tensor)
        if fault:
            yield f"weight '{tensor.name}' {fault}"
    for title, nodes in _bodies(file):
        for node in _all_nodes(nodes):
            for name, value in node.attributes.items():
                fault = tensor_fault(file, value) if isinstance(value, StoredTensor) else ""
                if fault:
                    yield f"attribute {name} of node '{node.title}' in {title} {fault}"
            for name, graph in node.graphs.items():
                yield from _graph_faults(file, f"{name} of node '{node.title}'", graph)


def _graph_faults(file: OnnxFile, title: str, graph: FileGraph) -> Iterator[str]:
    yield from (f"{title} holds {what}, which no step here has" for what in graph.foreign)
    for tensor in graph.weights:
        fault = tensor_fault(file, tensor)
        if fault:
            yield f"weight '{tensor.name}' of {title} {fault}"


def tensor_fault(file: OnnxFile, tensor: StoredTensor) -> str:
    """What is wrong with a stored tensor: its type, its sizes, or that its bytes are not all there."""
    if tensor.dtype is None:
        return f"is of type {tensor.kind}, which no tensor here has"
    fault = size_fault(tensor.shape, tensor.dtype.itemsize)
    if fault:
        return fault
    wanted = prod(tensor.shape) * tensor.dtype.itemsize
    if tensor.external is not None:
        return external_fault(file.path, tensor.external, wanted)
    if len(tensor.data) != wanted:
        return f"{list(tensor.shape)} needs {wanted} bytes and has {len(tensor.data)}"
    return ""


def _bodies(file: OnnxFile) -> Iterator[tuple[str, tuple[FileNode, ...]]]:
    yield "the graph", file.nodes
    for item in file.functions:
        yield f"function {item.name}", item.nodes


def _function_faults(file: OnnxFile) -> Iterator[str]:
    """Duplicates, circles of calls, and more nodes than anybody means once functions stand where they are called."""
    functions = {(item.domain, item.name): item for item in file.functions}
    if len(functions) < len(file.functions):
        yield "two functions have one name"
    called = {
        key: {(node.domain, node.op) for node in _all_nodes(item.nodes)} & functions.keys()
        for key, item in functions.items()
    }
    try:
        order = list(TopologicalSorter(called).static_order())
    except CycleError as error:
        yield f"functions call one another in a circle: {' -> '.join(name for _, name in error.args[1])}"
        return
    counts: dict[tuple[str, str], int] = {}
    for key in order:
        counts[key] = sum(counts.get((node.domain, node.op), 1) for node in _all_nodes(functions[key].nodes))
    total = sum(counts.get((node.domain, node.op), 1) for node in _all_nodes(file.nodes))
    if total > MOST_NODES:
        yield f"it has {total:.3g} nodes, at most {MOST_NODES:.3g} are taken"


def _all_nodes(nodes: Iterable[FileNode]) -> Iterator[FileNode]:
    for node in nodes:
        yield node
        for graph in node.graphs.values():
            yield from _all_nodes(graph.nodes)


def _ordered(
    title: str,
    given: Iterable[str],
    wanted: Iterable[str],
    nodes: tuple[FileNode, ...],
    around: tuple[Container[str], ...] = (),
) -> tuple[tuple[FileNode, ...], list[str]]:
    """The nodes in an order in which they can run, and what is wrong with their names.

    ``around`` hold the names that are known where the graph stands as an attribute.
    """
    made: dict[str, int] = {}
    faults: list[str] = []
    inputs = set(given)
    if "" in inputs:
        faults.append(f"{title} has an input without a name")
    for place, node in enumerate(nodes):
        for name in filter(None, node.outputs):
            if name in made or name in inputs:
                faults.append(f"'{name}' is made twice in {title}, by node '{node.title}' among others")
            made[name] = place
    known = (made, inputs, *around)
    results = list(wanted)
    if len(set(results)) < len(results) and not around:
        faults.append(f"{title} has two outputs of one name")
    for name in results:
        if not _is_known(name, known):
            faults.append(f"output '{name}' is made by no node of {title}")
    for node in nodes:
        unknown = [name for name in node.inputs if name and not _is_known(name, known)]
        faults += [f"node '{node.title}' in {title} reads '{name}', which nothing makes" for name in unknown]
    nodes, inner = _graphs_ordered(nodes, known)
    faults += inner
    before = {place: {made[name] for name in node.reads if name in made} for place, node in enumerate(nodes)}
    if not faults and any(max(needed, default=-1) >= place for place, needed in before.items()):
        try:
            return tuple(nodes[place] for place in TopologicalSorter(before).static_order()), []
        except CycleError as error:
            circle = " -> ".join(f"'{nodes[place].title}'" for place in error.args[1][:6])
            faults.append(f"nodes of {title} wait for one another in a circle: {circle}")
    return nodes, faults


def _is_known(name: str, known: tuple[Container[str], ...]) -> bool:
    return any(name in names for names in known)


def _graphs_ordered(
    nodes: tuple[FileNode, ...], known: tuple[Container[str], ...]
) -> tuple[tuple[FileNode, ...], list[str]]:
    """The nodes with the graphs among their attributes put in order, and what is wrong with those."""
    result, faults = list(nodes), list[str]()
    for place, node in enumerate(nodes):
        attributes = dict(node.attributes)
        for name, graph in node.graphs.items():
            given = [*graph.inputs, *(tensor.name for tensor in graph.weights)]
            title = f"{name} of node '{node.title}'"
            for what, names in (("inputs", graph.inputs), ("weights", [tensor.name for tensor in graph.weights])):
                if len(set(names)) < len(names):
                    faults.append(f"two {what} of {title} have one name")
            ordered, found = _ordered(title, given, graph.outputs, graph.nodes, known)
            attributes[name] = replace(graph, nodes=ordered)
            faults += found
        if node.graphs:
            result[place] = replace(node, attributes=attributes)
    return tuple(result), faults
