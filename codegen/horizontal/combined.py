"""Pointwise regions with operands of their own as one kernel: a program looks up which tile of which region it has.

Each region's kernel is generated as if it stood alone; here its programs get their number from a table of tiles.
"""

import ast
import operator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from kimigraph.codegen.horizontal.head import HEAD
from kimigraph.codegen.kernel import KernelLaunch, KernelModule
from kimigraph.codegen.pointwise import build_region
from kimigraph.ir.errors import CompileError
from kimigraph.ir.purity import region_module


@dataclass(frozen=True)
class Member:
    """One region in the kernel: its own kernel file taken apart, its names prefixed so that none is there twice."""

    node: Node
    module: KernelModule
    prefix: str
    tree: ast.Module

    @classmethod
    def of(cls, number: int, node: Node) -> "Member":
        """The member number ``number``, which runs as ``node``."""
        child = region_module(node)
        if child is None:
            raise CompileError(f"node {node.name} runs no region, so it cannot be part of a horizontal one")
        module = build_region(child)
        return cls(node, module, f"part_{number}", ast.parse(module.text))

    @property
    def record(self) -> KernelLaunch:
        """Its only launch."""
        [launch] = self.module.launches
        return launch

    def function(self, name: str) -> ast.FunctionDef:
        """A function of its file."""
        return next(node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name == name)

    @property
    def helpers(self) -> list[ast.FunctionDef]:
        """What its kernel calls."""
        own = (self.record.function, "launch")
        return [node for node in self.tree.body if isinstance(node, ast.FunctionDef) and node.name not in own]

    @property
    def launch_call(self) -> ast.Call:
        """The statement of its ``launch`` that launches."""
        calls = [item.value for item in self.function("launch").body if isinstance(item, ast.Expr)]
        return next(call for call in calls if isinstance(call, ast.Call))

    @property
    def tiles(self) -> int:
        """How many programs it has."""
        launcher: Any = self.launch_call.func
        grid = ast.literal_eval(launcher.slice)
        return int(grid[0])

    def source(self, node: ast.AST) -> str:
        """Text of a part of its file."""
        found = ast.get_source_segment(self.module.text, node)
        assert found is not None
        return found


def build_combined(child: GraphModule) -> KernelModule:
    """The kernel of a horizontal region of pointwise regions; ``launch`` takes its inputs and returns its results."""
    nodes = [node for node in child.graph.nodes if node.op == "call_module"]
    members = [Member.of(number, node) for number, node in enumerate(nodes)]
    options: dict[str, Any] = {**members[0].record.options}
    # A member's tile is right for any number of warps; the largest wants the most.
    options["num_warps"] = max(member.record.options["num_warps"] for member in members)
    options.pop("launch_pdl", None)  # not every member waits for the launches before
    helpers = {helper.name: _decorated(member, helper) for member in members for helper in member.helpers}
    parts = [HEAD.format(options=options).strip(), *helpers.values()]
    parts += [_part(member) for member in members]
    parts += [_kernel(members), _launch(child, members)]
    identity = "\n".join([*(member.module.identity for member in members), _wiring(child)])
    return KernelModule("\n\n\n".join(parts) + "\n", (_record(members, options),), identity)


def _decorated(member: Member, function: ast.FunctionDef) -> str:
    lines = member.module.text.splitlines()
    return "\n".join(lines[function.decorator_list[0].lineno - 1 : function.end_lineno])


def _part(member: Member) -> str:
    """The member's kernel as a function of the number of its tile."""
    text = _decorated(member, member.function(member.record.function))
    if text.count("tl.program_id(0)") != 1 or "tl.program_id(1)" in text or "tl.num_programs" in text:
        raise CompileError(f"node {member.node.name}: the kernel has more than one axis of programs, so it stays alone")
    text = text.replace(f"def {member.record.function}(", f"def {member.prefix}(\n    tile,", 1)
    return text.replace("tl.program_id(0)", "tile")


def _kernel(members: list[Member]) -> str:
    lines = ["@triton.jit", "def combined("]
    for member in members:
        lines += [f"    {member.prefix}_{name}," for name in member.record.signature]
    lines += ["    INTERPRET: tl.constexpr,", "):"]
    lines += [f'    """{"; ".join(f"{m.tiles:,} tiles of {m.prefix}" for m in members)}."""']
    lines += ["    tile = tl.program_id(0)"]
    begin = 0
    for number, member in enumerate(members):
        last = number == len(members) - 1
        end = begin + member.tiles
        lines.append("    else:" if last else f"    {'elif' if number else 'if'} tile < {end}:")
        names = [f"{member.prefix}_{name}" for name in member.record.signature]
        constants = [f"{name}={value}" for name, value in member.record.constants.items() if name != "INTERPRET"]
        arguments = ", ".join([f"tile - {begin}" if begin else "tile", *names, *constants, "INTERPRET=INTERPRET"])
        lines.append(f"        {member.prefix}({arguments})  # fmt: skip")
        begin = end
    return "\n".join(lines)


class _Renamed(ast.NodeTransformer):
    """Local names of a member's ``launch`` become names of the combined one."""

    def __init__(self, names: dict[str, str], prefix: str) -> None:
        self.names, self.prefix = names, prefix

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id not in ("torch", "memory"):
            node.id = self.names.setdefault(node.id, f"{self.prefix}_{node.id}")
        return node


def _launch(child: GraphModule, members: list[Member]) -> str:
    inputs = [node for node in child.graph.nodes if node.op == "placeholder"]
    values: dict[Node, str] = {node: f"input_{number}" for number, node in enumerate(inputs)}
    parameters = [*(values[node] for node in inputs), "*", "memory=torch"]
    lines = [f"def launch({', '.join(parameters)}):"]
    lines.append('    """The region\'s inputs in order -> its results; what it writes changes in place."""')
    operands: list[str] = []
    for member in members:
        statements, arguments, results = _placed(member, values)
        lines += [f"    {statement}" for statement in statements]
        operands += arguments
        _hand_on(member.node, results, values)
    grid = sum(member.tiles for member in members)
    lines.append(f"    combined[({grid},)]({', '.join(operands)}, INTERPRET=INTERPRET, **OPTIONS)  # fmt: skip")
    returned: Any = next(iter(reversed(child.graph.nodes))).args[0]
    if isinstance(returned, Node):
        return "\n".join([*lines, f"    return {values[returned]}"])
    several = "".join(f"{values[node]}, " for node in returned)
    return "\n".join([*lines, f"    return ({several.rstrip()})"])


def _placed(member: Member, values: dict[Node, str]) -> tuple[list[str], list[str], list[str]]:
    """The statements that allocate, the kernel's arguments and the results of a member, under the outer names."""
    launch = member.function("launch")
    names = {p.arg: values[node] for p, node in zip(launch.args.args, _arguments(member.node), strict=True)}
    renamed = _Renamed(names, member.prefix)
    statements = [ast.unparse(renamed.visit(item)) for item in launch.body if isinstance(item, ast.Assign)]
    arguments = [ast.unparse(renamed.visit(argument)) for argument in member.launch_call.args]
    returned = next(item for item in launch.body if isinstance(item, ast.Return)).value
    assert returned is not None
    results = returned.elts if isinstance(returned, ast.Tuple) else [returned]
    return statements, arguments, [ast.unparse(renamed.visit(item)) for item in results]


def _arguments(node: Node) -> list[Node]:
    return [argument for argument in node.args if isinstance(argument, Node)]


def _hand_on(node: Node, results: list[str], values: dict[Node, str]) -> None:
    """Name what the region gives: the call itself, or each item that is taken of it."""
    if results:
        values[node] = results[0]
    for user in node.users:
        if user.target is operator.getitem:
            index: Any = user.args[1]
            values[user] = results[index]


def _wiring(child: GraphModule) -> str:
    """Which inputs go where and what comes out, without names."""
    numbers = {node: number for number, node in enumerate(child.graph.nodes)}
    lines = [
        f"{node.op if node.op == 'call_module' else node.target} {[numbers[item] for item in node.all_input_nodes]}"
        for node in child.graph.nodes
        if node.op != "placeholder"
    ]
    return "\n".join(lines)


def _record(members: list[Member], options: dict[str, Any]) -> KernelLaunch:
    types = {f"{m.prefix}_{name}": given for m in members for name, given in m.record.signature.items()}
    divisible = tuple(f"{member.prefix}_{name}" for member in members for name in member.record.divisible)
    return KernelLaunch("combined", types, {"INTERPRET": False}, divisible, options)
