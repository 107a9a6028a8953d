"""What becomes part of a combined kernel: the kernel file of each member taken apart, its names prefixed."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from kimigraph.codegen.kernel import KernelLaunch, KernelModule
from kimigraph.codegen.pointwise import build_region
from kimigraph.codegen.request import kernel_request, semantic_operator, tensor_arguments
from kimigraph.ir.errors import CompileError
from kimigraph.ir.purity import region_module


@dataclass(frozen=True)
class Placed:
    """What ``launch`` of the combined kernel does for a member, under its own names.

    ``statements`` come first, then the kernel takes ``operands``; ``results`` are what the member gives.
    """

    statements: list[str]
    operands: list[str]
    results: list[str]


@dataclass(frozen=True)
class Member:
    """A member of a combined kernel, one launch of one axis of programs; no two members have a name in common."""

    node: Node
    module: KernelModule
    prefix: str
    tree: ast.Module

    @property
    def record(self) -> KernelLaunch:
        """Its only launch."""
        [launch] = self.module.launches
        return launch

    @property
    def identity(self) -> str:
        """What its kernel follows from."""
        return self.module.identity or self.module.text

    @property
    def helpers(self) -> dict[str, str]:
        """The functions that its kernel calls and those that these call, by name."""
        functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        used, waiting = set[str](), [functions[self.record.function]]
        while waiting:
            names = {node.id for node in ast.walk(waiting.pop()) if isinstance(node, ast.Name)} & {*functions}
            waiting += [functions[name] for name in sorted(names - used)]
            used |= names
        return {name: self.text_of(node) for name, node in functions.items() if name in used}

    @property
    def launch_call(self) -> ast.Call:
        """The statement of its ``launch`` that launches."""
        calls = [item.value for item in self.function("launch").body if isinstance(item, ast.Expr)]
        return next(call for call in calls if isinstance(call, ast.Call))

    @property
    def tiles(self) -> int:
        """How many programs it has."""
        raise NotImplementedError

    def function(self, name: str) -> ast.FunctionDef:
        """A function of its file."""
        return next(node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == name)

    def text_of(self, function: ast.FunctionDef) -> str:
        """The function as its file has it, decorators included."""
        lines = self.module.text.splitlines()
        first = min([function.lineno, *(item.lineno for item in function.decorator_list)])
        return "\n".join(lines[first - 1 : function.end_lineno])

    def part(self) -> str:
        """Its kernel as a function of the number of its tile."""
        text = self.text_of(self.function(self.record.function))
        if text.count("tl.program_id(0)") != 1 or "tl.program_id(1)" in text or "tl.num_programs" in text:
            raise CompileError(
                f"node {self.node.name}: the kernel has more than one axis of programs, so it stays alone: compile with"
                " --disable-pass merge-regions"
            )
        text = text.replace(f"def {self.record.function}(", f"def {self.prefix}(\n    tile,", 1)
        return text.replace("tl.program_id(0)", "tile")

    def host_functions(self) -> list[str]:
        """Functions that ``launch`` of the combined kernel calls."""
        return []

    def call(self, place: str) -> str:
        """The call of ``part`` for the tile at ``place``."""
        raise NotImplementedError

    def placed(self, values: Mapping[Node, str]) -> Placed:
        """What the combined ``launch`` does for it; ``values`` has the names of what is there."""
        raise NotImplementedError

    def constants(self) -> list[str]:
        """The constants of its kernel, all but INTERPRET, as keyword arguments."""
        return [f"{name}={value}" for name, value in self.record.constants.items() if name != "INTERPRET"]


@dataclass(frozen=True)
class RegionMember(Member):
    """A pointwise region, which runs as the ``call_module`` node."""

    @property
    def tiles(self) -> int:
        """How many programs it has."""
        launcher: Any = self.launch_call.func
        grid = ast.literal_eval(launcher.slice)
        return int(grid[0])

    def call(self, place: str) -> str:
        """The call of ``part`` for the tile at ``place``."""
        names = [f"{self.prefix}_{name}" for name in self.record.signature]
        return f"{self.prefix}({', '.join([place, *names, *self.constants(), 'INTERPRET=INTERPRET'])})"

    def placed(self, values: Mapping[Node, str]) -> Placed:
        """Allocates what the region gives."""
        launch = self.function("launch")
        given = [argument for argument in self.node.args if isinstance(argument, Node)]
        names = {p.arg: values[node] for p, node in zip(launch.args.args, given, strict=True)}
        renamed = _Renamed(names, self.prefix)
        statements = [ast.unparse(renamed.visit(item)) for item in launch.body if isinstance(item, ast.Assign)]
        operands = [ast.unparse(renamed.visit(argument)) for argument in self.launch_call.args]
        returned = next(item for item in launch.body if isinstance(item, ast.Return)).value
        assert returned is not None
        results = returned.elts if isinstance(returned, ast.Tuple) else [returned]
        return Placed(statements, operands, [ast.unparse(renamed.visit(item)) for item in results])


@dataclass(frozen=True)
class OperatorMember(Member):
    """A semantic operator that writes and gives nothing, with a template's kernel of one launch.

    What its ``launch`` does before it launches stays a function of its own, which returns the kernel's operands.
    """

    @property
    def tiles(self) -> int:
        """How many programs it has."""
        [count] = self._table()["grid"]
        return int(count)

    def call(self, place: str) -> str:
        """The call of ``part`` for the tile at ``place``: by keywords, as absent operands stand between the others."""
        given = [f"{name}={self.prefix}_{name}" for name in self.record.signature]
        return f"{self.prefix}({', '.join([place, *given, *self.constants(), 'INTERPRET=INTERPRET'])})"

    def host_functions(self) -> list[str]:
        """``part_<n>_operands``, and what it calls."""
        launch = self.function("launch")
        table, kernel = self._table(), self.function(self.record.function)
        given = zip(kernel.args.args, self.launch_call.args, strict=False)
        present = [ast.unparse(value) for parameter, value in given if parameter.arg in self.record.signature]
        steps = [_Looked(table).visit(item) for item in launch.body[1:] if not _launches(item, self.launch_call)]
        parameters = ", ".join(parameter.arg for parameter in launch.args.args)
        lines = [f"def {self.prefix}_operands({parameters}):"]
        lines += [f"    {line}" for item in steps for line in ast.unparse(item).splitlines()]
        lines.append(f"    return ({', '.join(present)},)")
        called = {node.id for item in steps for node in ast.walk(item) if isinstance(node, ast.Name)}
        functions = [node for node in self.tree.body if isinstance(node, ast.FunctionDef)]
        return [*(self.text_of(node) for node in functions if node.name in called), "\n".join(lines)]

    def placed(self, values: Mapping[Node, str]) -> Placed:
        """Views of caches, where those hold several parts."""
        found = tensor_arguments(self.node).values()
        given = ", ".join(values[node] if isinstance(node, Node) else "None" for node in found)
        return Placed([f"{self.prefix} = {self.prefix}_operands({given})"], [f"*{self.prefix}"], [])

    def _table(self) -> dict[str, Any]:
        assigned = [node for node in self.tree.body if isinstance(node, ast.AnnAssign)]
        value = next(node.value for node in assigned if ast.unparse(node.target) == "CONSTANTS")
        assert value is not None
        return ast.literal_eval(value)


def member_of(number: int, node: Node) -> Member:
    """The member number ``number``, which runs as ``node``. CompileError where that has no kernel."""
    child = region_module(node) if node.op == "call_module" else None
    operator = semantic_operator(node)
    if child is None and operator is None:
        raise CompileError(
            f"node {node.name} runs no region, so it cannot be part of a horizontal one: compile with"
            " --disable-pass merge-regions"
        )
    if child is not None:
        module = build_region(child)
        return RegionMember(node, module, f"part_{number}", ast.parse(module.text))
    # Imported here: the templates' builders import what makes regions.
    from kimigraph.codegen.specialize import BUILDERS

    module = BUILDERS[operator or ""](kernel_request(node))
    return OperatorMember(node, module, f"part_{number}", ast.parse(module.text))


class _Renamed(ast.NodeTransformer):
    """Local names of a member's ``launch`` become names of the combined one."""

    def __init__(self, names: dict[str, str], prefix: str) -> None:
        self.names, self.prefix = names, prefix

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id not in ("torch", "memory", "INTERPRET"):
            node.id = self.names.setdefault(node.id, f"{self.prefix}_{node.id}")
        return node


class _Looked(ast.NodeTransformer):
    """Entries of the file's table of constants become what they are."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if ast.unparse(node.value) != "CONSTANTS":
            return node
        return ast.parse(repr(self.table[ast.literal_eval(node.slice)]), mode="eval").body


def _launches(statement: ast.stmt, call: ast.Call) -> bool:
    return isinstance(statement, ast.Expr) and statement.value is call
