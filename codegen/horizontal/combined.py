"""Pointwise regions and writers of cache rows with operands of their own as one kernel over a table of tiles.

Each member's kernel is made as if it stood alone; here its programs get their number from the table.
"""

import operator
from typing import Any

from torch.fx import GraphModule, Node

from kimigraph.codegen.horizontal.head import HEAD
from kimigraph.codegen.horizontal.members import Member, member_of
from kimigraph.codegen.kernel import KernelLaunch, KernelModule
from kimigraph.codegen.request import semantic_operator
from kimigraph.ir.errors import CompileError


def is_member(node: Node) -> bool:
    """Whether the node of a region's child is one of those that a combined kernel is made of."""
    return node.op == "call_module" or semantic_operator(node) is not None


def build_combined(child: GraphModule) -> KernelModule:
    """The kernel of a horizontal region of such members; ``launch`` takes its inputs and returns its results."""
    nodes = [node for node in child.graph.nodes if is_member(node)]
    members = [member_of(number, node) for number, node in enumerate(nodes)]
    options = _options(members)
    functions: dict[str, str] = {}
    for member in members:
        for name, text in member.helpers.items():
            if functions.setdefault(name, text) != text:
                raise CompileError(
                    f"node {member.node.name}: another kernel of the region has a function {name} with another text:"
                    " compile with --disable-pass merge-regions"
                )
    host = dict.fromkeys(text for member in members for text in member.host_functions())
    parts = [HEAD.format(options=options).strip(), *functions.values()]
    parts += [member.part() for member in members]
    parts += [_kernel(members), *host, _launch(child, members)]
    identity = "\n".join([*(member.identity for member in members), _wiring(child)])
    return KernelModule("\n\n\n".join(parts) + "\n", (_record(members, options),), identity)


def _options(members: list[Member]) -> dict[str, Any]:
    """A member's tile is right for any number of warps; the largest wants the most."""
    options: dict[str, Any] = {**members[0].record.options}
    options["num_warps"] = max(member.record.options["num_warps"] for member in members)
    if not all(member.record.options.get("launch_pdl") for member in members):
        options.pop("launch_pdl", None)  # not every member waits for the launches before
    return options


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
        lines.append(f"        {member.call(f'tile - {begin}' if begin else 'tile')}  # fmt: skip")
        begin = end
    return "\n".join(lines)


def _launch(child: GraphModule, members: list[Member]) -> str:
    inputs = [node for node in child.graph.nodes if node.op == "placeholder"]
    values: dict[Node, str] = {node: f"input_{number}" for number, node in enumerate(inputs)}
    parameters = [*(values[node] for node in inputs), "*", "memory=torch"]
    lines = [f"def launch({', '.join(parameters)}):"]
    lines.append('    """The region\'s inputs in order -> its results; what it writes changes in place."""')
    operands: list[str] = []
    for member in members:
        placed = member.placed(values)
        lines += [f"    {statement}" for statement in placed.statements]
        operands += placed.operands
        _hand_on(member.node, placed.results, values)
    grid = sum(member.tiles for member in members)
    lines.append(f"    combined[({grid},)]({', '.join(operands)}, INTERPRET=INTERPRET, **OPTIONS)  # fmt: skip")
    returned: Any = next(iter(reversed(child.graph.nodes))).args[0]
    if isinstance(returned, Node):
        return "\n".join([*lines, f"    return {values[returned]}"])
    several = "".join(f"{values[node]}, " for node in returned)
    return "\n".join([*lines, f"    return ({several.rstrip()})"])


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
