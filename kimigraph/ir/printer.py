"""A program as a Python script that a person can read and that runs: what ``--dump-passes`` writes.

The text is a function of the program alone, the same in every process.
"""

import base64
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import describe
from kimigraph.ir.known_lines import KnownLines
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.provenance import module_class, module_path
from kimigraph.ir.purity import mutated_arguments, region_module, storage_root
from kimigraph.ir.schedule import describe_schedule
from kimigraph.ir.spelling import format_argument, format_call, region_function, variable_names

__all__ = [
    "PRINTED_IMPORTS",
    "format_argument",
    "format_call",
    "print_functions",
    "print_heading",
    "print_program",
    "print_tables",
]

_RESERVED = frozenset(
    (
        "CONSTANTS INPUTS InputSpec OUTPUTS complex constant float getattr main math operator slice step torch"
        " with_strides"
    ).split()
)
_WIDTH = 120
_INLINE_ELEMENTS = 64
PRINTED_IMPORTS = """import math
import operator

import torch

import kimigraph.ir.operators
from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import constant, main, with_strides"""
"""What the text of ``print_tables`` and ``print_functions`` needs, and the ``main`` of dumps."""
_USAGE = """Run as a script, it makes seeded tensors, does one step and prints "<name> <sum> <magnitudes> <dot>"
for each output and each input that the step updates; --seed N takes other tensors, --weights DIR those of
DIR/*.safetensors."""
_MAIN = """if __name__ == "__main__":
    main(step, INPUTS, OUTPUTS, CONSTANTS)"""


def print_program(
    program: CapturedProgram, title: str = "A captured program", note: str = "", known: KnownLines | None = None
) -> str:
    """The program as a script: one line a node, a comment where the module changes, regions as functions.

    ``title`` is the script's first line and ``note`` a paragraph below it. Who prints a program more than once gives
    ``known``, which keeps what did not change. Raises CompileError naming the node that has
    no spelling, or the constant whose value the program does not hold.
    """
    return "\n\n\n".join(
        [
            print_heading(title, *([textwrap.fill(note, _WIDTH)] if note else []), _USAGE) + "\n\n" + PRINTED_IMPORTS,
            print_tables(program),
            print_functions(program, "step", "One step; caches change in place.", known),
            _main(program) + "\n",
        ]
    )


def _main(program: CapturedProgram) -> str:
    mesh = program.info.get("mesh")
    return _MAIN.replace("CONSTANTS)", f"CONSTANTS, mesh={mesh})") if mesh else _MAIN


def print_heading(*paragraphs: str) -> str:
    """A module docstring of these paragraphs."""
    return '"""' + "\n\n".join(paragraphs).replace("\\", "\\\\").replace('"""', "'''") + '\n"""'


def print_functions(program: CapturedProgram, name: str, title: str, known: KnownLines | None = None) -> str:
    """The program as a function ``name`` with docstring ``title``, after one for each of its regions."""
    known = known or KnownLines()
    children = _children(program.graph_module)
    reserved = _RESERVED | {region_function(node) for node, _ in children} | {name}
    parts = [_function(region_function(node), child, reserved, _region_title(node), known) for node, child in children]
    return "\n\n\n".join([*parts, "@torch.no_grad()\n" + _function(name, program.graph_module, reserved, title, known)])


def print_tables(program: CapturedProgram, *others: CapturedProgram) -> str:
    """INPUTS, OUTPUTS and CONSTANTS of the program; ``others`` are later forms of it that may hold more constants."""
    constants = dict(entry for form in (program, *others) for entry in _constants(form))
    return _tables(program, constants)


def _tables(program: CapturedProgram, texts: dict[str, str]) -> str:
    outputs = ", ".join(f'"{spec.name}"' for spec in program.outputs)
    constants = [f"    {format_argument(name, str)}: {text}," for name, text in texts.items()]
    return "\n".join(
        [
            "INPUTS = (",
            *(f"    {_input(spec)}," for spec in program.inputs),
            ")",
            f"OUTPUTS = ({outputs}{',' if len(program.outputs) == 1 else ''})",
            "CONSTANTS = {" + ("" if constants else "}"),
            *([*constants, "}"] if constants else []),
        ]
    )


def _input(spec: InputSpec) -> str:
    values = [(field, getattr(spec, field.name)) for field in fields(spec)]
    shown = [_quoted(value) for _, value in values[:6]]
    shown += [f"{field.name}={_quoted(value)}" for field, value in values[6:] if value != field.default]
    return f"InputSpec({', '.join(shown)})"


def _quoted(value: Any) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)


def _constants(program: CapturedProgram) -> Iterator[tuple[str, str]]:
    """Name and literal of every constant: placeholders of that kind by source, get_attr tensors by target."""
    for spec in program.inputs:
        if spec.kind == "constant":
            yield spec.source, _literal(spec.source, program.tensors.get(spec.name))
    seen: set[str] = set()
    for graph in (program.graph_module, *(child for _, child in _children(program.graph_module))):
        for node in graph.graph.nodes:
            if node.op == "get_attr" and str(node.target) not in seen:
                seen.add(str(node.target))
                yield str(node.target), _literal(str(node.target), _attribute(graph, str(node.target)))


def _attribute(owner: Any, path: str) -> Any:
    for part in path.split("."):
        owner = getattr(owner, part, None)
    return owner


def _literal(name: str, value: Any) -> str:
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise CompileError(f"constant {name}: the program holds no value for it, so it cannot be printed")
    if not value.is_contiguous():
        return f"with_strides({_literal(name, value.contiguous())}, {list(value.stride())})"
    value = value.detach().cpu()
    float8 = value.is_floating_point() and value.dtype.itemsize == 1
    if 0 < value.numel() <= _INLINE_ELEMENTS and not float8:
        return f"torch.tensor({format_argument(value.tolist(), str)}, dtype={value.dtype})"
    data = bytes(value.reshape(-1).view(torch.uint8).tolist()) if value.numel() else b""
    shape = ", ".join(str(size) for size in value.shape)
    return f'constant("{base64.b64encode(data).decode()}", [{shape}], {value.dtype})'


def _children(graph_module: GraphModule) -> list[tuple[Node, GraphModule]]:
    """Every region once, with a node that calls it, innermost first."""
    found: dict[str, tuple[Node, GraphModule]] = {}
    for node in graph_module.graph.nodes:
        child = region_module(node) if node.op == "call_module" else None
        if child is not None:
            for inner, module in _children(child):
                found.setdefault(region_function(inner), (inner, module))
            found.setdefault(region_function(node), (node, child))
    return list(found.values())


def _region_title(node: Node) -> str:
    kind = node.meta.get("region", "")
    return f"Region {node.target}{f', {kind}' if kind else ''}."


def _function(
    name: str, graph_module: GraphModule, reserved: frozenset[str], title: str, lines_known: KnownLines
) -> str:
    graph = graph_module.graph
    names = variable_names(graph.nodes, reserved)
    lines_known.begin(names)
    parameters = [names[node] for node in graph.nodes if node.op == "placeholder"]
    lines = [*_signature(name, parameters), f'    """{title}"""']
    module, stack = None, None
    dying, known = _last_uses(graph), dict[Node, Node]()
    for node in graph.nodes:
        if node.op == "placeholder":
            continue
        before, stack = stack, node.meta.get("nn_module_stack", stack)
        if stack != before and module_path(node) != module:
            module = module_path(node)
            kind = module_class(node)
            lines.append(f"    # {module or 'top'}{f' ({kind})' if kind else ''}")
        dead = dying.get(node, [])
        lines.append(lines_known.line(node, dead, partial(_statement, node, names, dead, known)))
    return "\n".join(lines)


def _signature(name: str, parameters: list[str]) -> list[str]:
    line = f"def {name}({', '.join(parameters)}):"
    if len(line) <= _WIDTH:
        return [line]
    body = textwrap.wrap(", ".join(parameters) + ",", _WIDTH - 4, break_long_words=False, break_on_hyphens=False)
    return [f"def {name}(", *(f"    {row}" for row in body), "):"]


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """For each node, the variables that no later node reads; a caller's tensors and what is returned stay."""
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and not node.users:
            last[node] = node
        for argument in node.all_input_nodes:
            last[argument] = node
    dying: dict[Node, list[Node]] = {}
    for argument, node in last.items():
        if argument.op != "placeholder" and node.op != "output":
            dying.setdefault(node, []).append(argument)
    return dying


def _statement(node: Node, names: dict[Node, str], dying: Iterable[Node], known: dict[Node, Node]) -> str:
    return "    " + _unindented(node, names, dying, known)


def _unindented(node: Node, names: dict[Node, str], dying: Iterable[Node], known: dict[Node, Node]) -> str:
    def name_of(argument: Node) -> str:
        return names[argument]

    if node.op == "output":
        told = "; ".join(describe_schedule(node))
        return f"return {format_argument(node.args[0], name_of)}" + (f"  # {told}" if told else "")
    call = f'CONSTANTS["{node.target}"]' if node.op == "get_attr" else format_call(node, name_of)
    freed = [names[argument] for argument in dying]
    statement = f"{names[node]} = {call}" if node.users else call
    freed = [name for name in freed if node.users or name != names[node]]
    return statement + (f"; del {', '.join(freed)}" if freed else "") + f"  # {_comment(node, names, known)}"


def _comment(node: Node, names: dict[Node, str], known: dict[Node, Node]) -> str:
    facts = [describe(node.meta["val"]) if "val" in node.meta else "?"]
    written = dict.fromkeys(names.get(storage_root(argument, known), "?") for argument in mutated_arguments(node))
    if written:
        facts.append(f"writes {', '.join(written)}")
    facts += describe_schedule(node)
    if node.meta.get("selects"):
        facts.append(f"selects as {node.meta['selects']}")
    replaced = node.meta.get("replaces", ())
    if replaced:
        facts.append(f"replaces {len(replaced)} nodes, {replaced[0]} to {replaced[-1]}")
    return "; ".join(facts)
