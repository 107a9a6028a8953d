"""``program.py``: a graph as a host program that a person can read and that runs without kimigraph."""

import operator
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from kimigraph.codegen.arena_text import ArenaText, arena_text
from kimigraph.codegen.kernel_writer import KernelSet
from kimigraph.codegen.regions import kernel_kind
from kimigraph.codegen.source_text import LINE_LENGTH, one_line, operator_call, wrap
from kimigraph.codegen.stream_text import STREAMS_FILE, StreamText, stream_text
from kimigraph.ir.fake import describe
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path
from kimigraph.ir.purity import region_module
from kimigraph.ir.schedule import stream_of
from kimigraph.ir.spelling import format_argument, region_function, variable_names

_RESERVED = frozenset(
    (
        *("DEVICE", "HERE", "ModuleType", "Path", "SimpleNamespace", "arena", "aten", "constants", "cubins"),
        *("driver", "hashlib", "kernels", "lanes", "load", "math", "memory", "operator", "os", "ranks", "reference"),
        *("step", "streams", "sys", "torch"),
    )
)
OWN_ROWS, OF_RANKS = "torch.ops.kimigraph.own_rows.default(", "ranks.own_rows("
"""What a file beside a program for several ranks does."""
_BUILT_IN = ("aten", "prims", "_c10d_functional", "kimigraph")
_HOW_TO_RUN = """
{phase} of {model}, {shape_key}, for {target}.

The executor of kimigraph calls step() with the tensors of a model. Run as a script, this file makes seeded tensors,
does one step and prints a checksum per output and per input that the step updates; manifest.json holds the same:

    python program.py                     seeded weights, caches and inputs (--seed N: others)
    python program.py --weights DIR       the weights of DIR/*.safetensors, the rest seeded
    python program.py --check             compare with manifest.json, exit 3 on a difference

It needs {needs} and the files beside it, nothing else.{libraries}
"""
_LOADER = """
HERE = Path(__file__).resolve().parent
DEVICE = torch.device("{device}")
aten = torch.ops.aten


def load(file):
    \"""Import a file beside this one under a name of its own, so that several programs fit in a process.\"""
    path = HERE / file
    module = ModuleType("kimigraph_" + hashlib.sha256(os.fsencode(path)).hexdigest()[:16])
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
    return module
"""
_CONSTANTS = """
constants = dict(load("support/tensor_file.py").read_tensors(HERE / "constants.bin", device=DEVICE))
"""
_SCRIPT = """
if __name__ == "__main__":
    load("support/run_step.py").main(HERE, DEVICE, step, load)
"""


@dataclass(frozen=True)
class ProgramTitle:
    """What the head of ``program.py`` says: model, phase, shape key and target."""

    model: str
    phase: str
    shape_key: str
    target: str

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.target.partition(":")[0]


def program_text(program: CapturedProgram, kernels: KernelSet, title: ProgramTitle) -> str:
    """The text of ``program.py``: the same on every machine for the same graph.

    Raises CompileError for a node that a program cannot spell, naming it.
    """
    nodes = list(program.graph_module.graph.nodes)
    regions = _regions(nodes) if kernels.referenced else []
    names = variable_names(nodes, _RESERVED | {region_function(node) for node, _ in regions})
    written = [*nodes, *(inner for _, child in regions for inner in child.graph.nodes)]
    head = f"{_docstring(title, written, kernels)}\n\n{_imports(title, written)}\n{_LOADER.format(device=title.device)}"
    loads = [_CONSTANTS.strip()] if any(node.op == "get_attr" for node in written) else []
    streams = stream_text(nodes, names)
    loads += [f'streams = load("{STREAMS_FILE}")'] if streams.count > 1 else []
    arena = arena_text(program.graph_module.graph, kernels)
    loads += [*arena.load(), *kernels.imports()]
    step = [*_signature(program, names), *_body(nodes, kernels, names, streams, arena)]
    if any(OWN_ROWS in text for text in step):
        loads.append('ranks = load("support/ranks.py")')
        step = [text.replace(OWN_ROWS, OF_RANKS) for text in step]
    functions = [_region(node, child, kernels) for node, child in regions]
    parts = [head, "\n".join(loads), *functions, "\n".join(step), _SCRIPT]
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _docstring(title: ProgramTitle, nodes: list[Node], kernels: KernelSet) -> str:
    foreign = sorted({_namespace(node) for node in nodes} - {*_BUILT_IN, ""})
    libraries = (
        f"\nThe library that defines the operators of {', '.join(foreign)} must be imported first." if foreign else ""
    )
    text = _HOW_TO_RUN.format(
        phase=title.phase.capitalize() or "One step",
        model=one_line(title.model) or "a model",
        shape_key=one_line(title.shape_key) or "static shapes",
        target=title.target,
        needs="torch" if kernels.referenced or kernels.ahead_of_time else "torch, triton",
        libraries=libraries,
    )
    return f'"""{text.strip()}\n"""'


def _imports(title: ProgramTitle, nodes: list[Node]) -> str:
    modules = {"hashlib", "os", "sys", *(_plain_module(node) for node in nodes)} - {"", "torch"}
    lines = [f"import {name}" for name in sorted(modules)]
    lines += ["from pathlib import Path", "from types import ModuleType, SimpleNamespace", ""]
    if title.target == "cpu":
        lines += [
            'if __name__ == "__main__":',
            '    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported',
            "",
        ]
    return "\n".join([*lines, "import torch"])


def _signature(program: CapturedProgram, names: dict[Node, str]) -> list[str]:
    """``def step(`` with a line for each placeholder: its kind, outer name, dtype and shape."""
    lines = ["@torch.no_grad()", "def step("]
    for spec, placeholder in zip(program.inputs, program.placeholders.values(), strict=True):
        kind = f"{spec.kind}, updated in place" if spec.mutated else spec.kind
        shape = f"{spec.dtype}[{', '.join(str(size) for size in spec.shape)}]"
        lines.append(f"    {names[placeholder]},  # {kind}: {one_line(spec.source)} {shape}")
    return [*lines, "):", f'    """One step; returns ({", ".join(spec.name for spec in program.outputs)})."""']


def _regions(nodes: list[Node]) -> list[tuple[Node, GraphModule]]:
    """Every region once with a node that calls it, innermost first."""
    found: dict[str, tuple[Node, GraphModule]] = {}
    for node in nodes:
        child = region_module(node) if node.op == "call_module" else None
        if child is not None:
            found |= {region_function(inner): (inner, module) for inner, module in _regions(list(child.graph.nodes))}
            found.setdefault(region_function(node), (node, child))
    return list(found.values())


def _region(node: Node, child: GraphModule, kernels: KernelSet) -> str:
    """A region as a function: what ``cpu:reference`` calls where other targets have one kernel."""
    nodes = list(child.graph.nodes)
    names = variable_names(nodes, _RESERVED | {region_function(inner) for inner, _ in _regions(nodes)})
    parameters = [names[inner] for inner in nodes if inner.op == "placeholder"]
    head = wrap(parameters, "    ")
    signature = [f"def {region_function(node)}({', '.join(parameters)}):"]
    if len(signature[0]) > LINE_LENGTH:
        signature = [f"def {region_function(node)}(", *(f"{line}," for line in head), "):"]
    title = f'    """Region {node.target}, {node.meta.get("region", "")}."""'
    single = isinstance(nodes[-1].args[0], Node)
    return "\n".join([*signature, title, *_body(nodes, kernels, names, StreamText(), ArenaText(), single)])


def _body(
    nodes: list[Node],
    kernels: KernelSet,
    names: dict[Node, str],
    streams: StreamText,
    arena: ArenaText,
    single: bool = False,
) -> list[str]:
    """A statement for each node, a comment where the module changes, and what no later node reads is freed."""
    dying = _last_uses(nodes)
    lines = [*arena.begin(), *streams.fork()]
    module, stream = None, 0
    for node in nodes:
        if node.op == "placeholder" or _proven(node):
            continue
        if streams.count > 1 and stream != stream_of(node):
            stream = stream_of(node)
            lines += streams.enter(stream, "    ")
        indent = "        " if stream else "    "
        path = module_path(node)
        if node.op != "output" and path != module:
            lines.append(f"{indent}# {one_line(path) or 'top'}")
            module = path
        lines += streams.join() if node.op == "output" else streams.before(node, indent)
        lines += _statement(node, kernels, names, arena, single, indent)
        lines += streams.after(node, indent)
        lines += wrap([names[dead] for dead in dying.get(node, []) if dead not in streams.held], f"{indent}del ")
    return lines


def _last_uses(nodes: list[Node]) -> dict[Node, list[Node]]:
    """For each node, the variables that no later node reads; the caller's tensors and what is returned stay."""
    last = {argument: node for node in nodes if not _proven(node) for argument in node.all_input_nodes}
    dying: dict[Node, list[Node]] = {}
    for argument, node in last.items():
        if argument.op != "placeholder" and node.op != "output":
            dying.setdefault(node, []).append(argument)
    return dying


def _statement(
    node: Node, kernels: KernelSet, names: dict[Node, str], arena: ArenaText, single: bool, indent: str
) -> list[str]:
    def name_of(argument: Node) -> str:
        return names[argument]

    if node.op == "output":
        return [f"    return {format_argument(node.args[0] if single else _as_tuple(node.args[0]), name_of)}"]
    comment = describe(node.meta.get("val"))
    prefix = f"{indent}{names[node]} = " if node.users else indent
    comment = comment if node.users else f"{node.name}: {comment}"
    if node.op == "get_attr":
        return [f'{prefix}constants["{node.target}"]  # {comment}']
    call = kernels.call(node, name_of) if kernel_kind(node) else operator_call(node, name_of)
    call = arena.into_place(node, call, name_of)
    return [f"{prefix}{call}  # {comment}"] if isinstance(call, str) else call.render(prefix, comment)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _proven(node: Node) -> bool:
    """Whether the node asserts what the recorded values already prove: shapes and dtypes are static."""
    return _namespace(node) == "aten" and "_assert_tensor_metadata" in str(node.target)


def _namespace(node: Node) -> str:
    return node.target.namespace if isinstance(node.target, OpOverload) else ""


def _plain_module(node: Node) -> str:
    """The standard module that a call outside torch.ops needs; item access needs none."""
    if node.op != "call_function" or isinstance(node.target, OpOverload) or node.target is operator.getitem:
        return ""
    return str(getattr(node.target, "__module__", "")).lstrip("_")
