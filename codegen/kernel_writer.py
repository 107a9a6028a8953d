"""The kernel files of an artifact: which file computes each semantic node, and how ``program.py`` calls it."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.fx import Graph, Node

from kimigraph.codegen.architecture import cubin_arch
from kimigraph.codegen.host_half import host_half
from kimigraph.codegen.kernel import KernelModule
from kimigraph.codegen.reference_writer import reference_text
from kimigraph.codegen.regions import build_region_kernel, kernel_cost, kernel_kind, operators_within, region_key
from kimigraph.codegen.request import kernel_request, semantic_operator, tensor_arguments
from kimigraph.codegen.source_text import CallText, NameOf, argument_text, call_arguments, one_line, wrap
from kimigraph.ir.errors import CompileError
from kimigraph.ir.manifest import KernelRecord
from kimigraph.ir.provenance import module_path
from kimigraph.ir.schedule import stream_of
from kimigraph.ir.spelling import region_function

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

    @property
    def host_path(self) -> str:
        """The half that runs on the host, beside cubins."""
        return f"kernels/{self.name}_launch.py"

    @property
    def keeps_state(self) -> bool:
        """Whether launches in a CUDA graph share memory of the module's, so that two must not run side by side."""
        return "is_current_stream_capturing" in self.module.text

    def instance(self, stream: int) -> str:
        """The name under which ``program.py`` has the kernel for launches on a stream.

        One that keeps state is imported once for each stream, with a state of its own; another once.
        """
        first = min((stream_of(node) for node in self.nodes), default=0)
        return self.name if stream == first or not self.keeps_state else f"{self.name}_on_{stream}"

    def instances(self) -> list[str]:
        """All names of the kernel, each an import of its own."""
        return list(dict.fromkeys(self.instance(stream) for stream in sorted({stream_of(node) for node in self.nodes})))

    def text(self) -> str:
        """A docstring that says what the kernel stands for, then the template's text."""
        return _header(self.nodes, self.module.route) + self.module.text.lstrip("\n")


@dataclass
class KernelSet:
    """All semantic nodes and regions of a graph with their kernels.

    For ``cpu:reference`` the kernels are the operators' references, and functions of ``program.py`` for regions.

    ``file_of`` maps a node's name to its kernel file; identical layers share one file.
    """

    target: str
    nodes: list[Node]
    files: list[KernelFile]
    file_of: dict[str, KernelFile]

    @property
    def ahead_of_time(self) -> bool:
        """Whether the artifact holds cubins, which its program launches without Triton."""
        return cubin_arch(self.target) is not None

    @property
    def referenced(self) -> bool:
        """Whether the program calls references instead of kernels."""
        return self.target == "cpu:reference"

    def imports(self) -> list[str]:
        """The statements of ``program.py`` that import the kernels from the files beside it."""
        if not self.nodes:
            return []
        if self.referenced:
            return [f'reference = load("{REFERENCE_FILE}")'] if self._operators() else []
        if self.ahead_of_time:
            lines = [
                f'    {name}=cubins.load_host_half(HERE / "{file.host_path}", driver).launch,'
                for file in self.files
                for name in file.instances()
            ]
            loads = ['driver = load("support/cuda_driver.py")', 'cubins = load("support/cubins.py")']
            return [*loads, "kernels = SimpleNamespace(", *lines, ")"]
        lines = [f'    {name}=load("{file.path}").launch,' for file in self.files for name in file.instances()]
        return ["kernels = SimpleNamespace(", *lines, ")"]

    def call(self, node: Node, name_of: NameOf) -> CallText:
        """The call that stands for ``node`` in ``program.py``."""
        if node.op == "call_module":
            callee = region_function(node) if self.referenced else self._kernel(node)
            return CallText(callee, call_arguments(node, name_of))
        if self.referenced:
            return CallText(f"reference.{semantic_operator(node)}", call_arguments(node, name_of))
        arguments = tuple(argument_text(value, name_of) for value in tensor_arguments(node).values())
        return CallText(self._kernel(node), arguments)

    def _kernel(self, node: Node) -> str:
        return f"kernels.{self.file_of[node.name].instance(stream_of(node))}"

    def launches(self) -> dict[str, int]:
        """Kernel launches of each node that has a kernel, by its name."""
        return {node.name: len(self.file_of[node.name].module.launches) or 1 for node in self.nodes if self.files}

    def records(self) -> tuple[KernelRecord, ...]:
        """The kernels as the manifest and the report list them."""
        return tuple(self._record(node) for node in self.nodes)

    def write(self, directory: Path) -> list[str]:
        """Write the files; returns their paths relative to ``directory``."""
        texts = {file.path: file.text() for file in self.files}
        if self.ahead_of_time:
            texts |= {file.host_path: host_half(file.name, file.module.text) for file in self.files}
        if self.referenced and self._operators():
            texts[REFERENCE_FILE] = reference_text(self._operators())
        for path, text in texts.items():
            (directory / path).parent.mkdir(exist_ok=True)
            (directory / path).write_text(text, encoding="utf-8")
        return list(texts)

    def _operators(self) -> list[str]:
        return list(operators_within(self.nodes))

    def _record(self, node: Node) -> KernelRecord:
        cost = kernel_cost(node)
        path = "program.py" if node.op == "call_module" else REFERENCE_FILE
        path = path if self.referenced else self.file_of[node.name].path
        replaces = tuple(node.meta.get("replaces", ()))
        return KernelRecord(node.name, kernel_kind(node) or "", path, cost.bytes, cost.flops, replaces)


def build_kernels(graph: Graph, target: str) -> KernelSet:
    """The kernels that ``graph`` needs on ``target``; CompileError where an operator or a region has none."""
    nodes = [node for node in graph.nodes if kernel_kind(node) is not None]
    if target == "cpu:reference":
        return KernelSet(target, nodes, [], {})
    files: dict[tuple[Any, ...], KernelFile] = {}
    file_of: dict[str, KernelFile] = {}
    numbers: dict[str, int] = {}
    built: dict[Hashable, KernelModule] = {}
    for node in nodes:
        op = kernel_kind(node) or ""
        request = region_key(node) if node.op == "call_module" else repr(kernel_request(node, target))
        module = built[request] = built.get(request) or _build(node, op, target)
        # Equal layers share a file, unless cubins would differ: what lies at multiples of 16 bytes is compiled in.
        key = (op, module.identity or module.text, tuple(launch.divisible for launch in module.launches))
        if key not in files:
            number = numbers.setdefault(op, 0)
            numbers[op] += 1
            files[key] = KernelFile(f"{op}_{number}", module)
        files[key].nodes.append(node)
        file_of[node.name] = files[key]
    return KernelSet(target, nodes, list(files.values()), file_of)


def _build(node: Node, op: str, target: str) -> KernelModule:
    if node.op == "call_module":
        return build_region_kernel(node)
    # Imported here: a cpu:reference build needs no kernel templates.
    from kimigraph.codegen.specialize import BUILDERS

    if op not in BUILDERS:
        raise CompileError(f"node {node.name}: {op} has no kernel yet: compile this graph with --target cpu:reference")
    try:
        return BUILDERS[op](kernel_request(node, target))
    except CompileError as error:
        raise CompileError(f"node {node.name} ({module_path(node) or 'no module'}): {error}") from error


def _header(nodes: list[Node], route: str) -> str:
    """What the file computes, what a call costs and which captured nodes it stands for."""
    cost = kernel_cost(nodes[0])
    lines = [f"{kernel_kind(nodes[0])}: {cost.bytes:,} bytes and {cost.flops:,} FLOPs a call.", "", "Computes"]
    if route:
        lines[1:1] = wrap([f"Form: {route}."], "")
    for node in nodes:
        path = one_line(module_path(node))
        lines.append(f"  {node.name}" + (f" ({path})" if path else ""))
        replaces = list(node.meta.get("replaces", ()))
        if replaces:
            lines += wrap(replaces, "    instead of ")
    return '"""' + "\n".join(lines) + '\n"""\n\n'
