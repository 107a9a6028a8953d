"""The kernel files of an artifact: which file computes each semantic node, and how ``program.py`` calls it."""

from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import Graph, Node

from kimigraph.codegen.kernel import KernelModule
from kimigraph.codegen.reference_writer import reference_text
from kimigraph.codegen.request import call_cost, kernel_request, semantic_operator, tensor_arguments
from kimigraph.codegen.source_text import CallText, NameOf, argument_text, call_arguments, one_line, wrap
from kimigraph.ir.errors import CompileError
from kimigraph.ir.manifest import KernelRecord
from kimigraph.ir.provenance import module_path

REFERENCE_FILE = "kernels/reference.py"


@dataclass
class KernelFile:
    """One ``kernels/<name>.py`` and the nodes that share it."""

    name: str
    module: KernelModule
    nodes: list[Node] = field(default_factory=lambda: [])

    @property
    def path(self) -> str:
        """Relative to the artifact."""
        return f"kernels/{self.name}.py"

    def text(self) -> str:
        """A docstring that says what the kernel stands for, then the template's text."""
        return _header(self.nodes) + self.module.text.lstrip("\n")


@dataclass
class KernelSet:
    """All semantic nodes of a graph with their kernels; for ``cpu:reference`` the kernels are the references.

    ``file_of`` maps a node's name to its kernel file; identical layers share one file.
    """

    target: str
    nodes: list[Node]
    files: list[KernelFile]
    file_of: dict[str, KernelFile]

    @property
    def referenced(self) -> bool:
        """Whether the program calls references instead of kernels."""
        return self.target == "cpu:reference"

    def imports(self) -> list[str]:
        """The statements of ``program.py`` that import the kernels from the files beside it."""
        if not self.nodes:
            return []
        if self.referenced:
            return [f'reference = load("{REFERENCE_FILE}")']
        lines = [f'    {file.name}=load("{file.path}").launch,' for file in self.files]
        return ["kernels = SimpleNamespace(", *lines, ")"]

    def call(self, node: Node, name_of: NameOf) -> CallText:
        """The call that stands for ``node`` in ``program.py``."""
        if self.referenced:
            return CallText(f"reference.{semantic_operator(node)}", call_arguments(node, name_of))
        arguments = tuple(argument_text(value, name_of) for value in tensor_arguments(node).values())
        return CallText(f"kernels.{self.file_of[node.name].name}", arguments)

    def launches(self) -> dict[str, int]:
        """Kernel launches of each semantic node, by node name."""
        return {node.name: len(self.file_of[node.name].module.launches) or 1 for node in self.nodes if self.files}

    def records(self) -> tuple[KernelRecord, ...]:
        """The kernels as the manifest and the report list them."""
        return tuple(self._record(node) for node in self.nodes)

    def write(self, directory: Path) -> list[str]:
        """Write the files; returns their paths relative to ``directory``."""
        texts = {file.path: file.text() for file in self.files}
        if self.referenced and self.nodes:
            texts[REFERENCE_FILE] = reference_text(semantic_operator(node) or "" for node in self.nodes)
        for path, text in texts.items():
            (directory / path).parent.mkdir(exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
        return list(texts)

    def _record(self, node: Node) -> KernelRecord:
        cost = call_cost(node)
        path = REFERENCE_FILE if self.referenced else self.file_of[node.name].path
        replaces = tuple(node.meta.get("replaces", ()))
        return KernelRecord(node.name, semantic_operator(node) or "", path, cost.bytes, cost.flops, replaces)


def build_kernels(graph: Graph, target: str) -> KernelSet:
    """The kernels that ``graph`` needs on ``target``; CompileError where an operator has none."""
    nodes = [node for node in graph.nodes if semantic_operator(node) is not None]
    if target == "cpu:reference":
        return KernelSet(target, nodes, [], {})
    files: dict[tuple[str, str], KernelFile] = {}
    file_of: dict[str, KernelFile] = {}
    numbers: dict[str, int] = {}
    for node in nodes:
        op = semantic_operator(node) or ""
        module = _build(node, op, target)
        if (op, module.text) not in files:
            number = numbers.setdefault(op, 0)
            numbers[op] += 1
            files[op, module.text] = KernelFile(f"{op}_{number}", module)
        files[op, module.text].nodes.append(node)
        file_of[node.name] = files[op, module.text]
    return KernelSet(target, nodes, list(files.values()), file_of)


def _build(node: Node, op: str, target: str) -> KernelModule:
    # Imported here: a cpu:reference build needs no kernel templates.
    from kimigraph.codegen.specialize import BUILDERS

    if op not in BUILDERS:
        raise CompileError(f"node {node.name}: {op} has no kernel yet: compile this graph with --target cpu:reference")
    try:
        return BUILDERS[op](kernel_request(node, target))
    except CompileError as error:
        raise CompileError(f"node {node.name} ({module_path(node) or 'no module'}): {error}") from error


def _header(nodes: list[Node]) -> str:
    """What the file computes, what a call costs and which captured nodes it stands for."""
    cost = call_cost(nodes[0])
    lines = [f"{semantic_operator(nodes[0])}: {cost.bytes:,} bytes and {cost.flops:,} FLOPs a call.", "", "Computes"]
    for node in nodes:
        path = one_line(module_path(node))
        lines.append(f"  {node.name}" + (f" ({path})" if path else ""))
        replaces = list(node.meta.get("replaces", ()))
        if replaces:
            lines += wrap(replaces, "    instead of ")
    return '"""' + "\n".join(lines) + '\n"""\n\n'
