"""Products of a few rows with several weights as one kernel: a program looks up which tile of which weight it has."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kimigraph.codegen.horizontal.head import HEAD, template_functions
from kimigraph.codegen.kernel import KernelLaunch, KernelModule
from kimigraph.codegen.specialize.rendering import TRITON_TYPES, ceil_div, padded
from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import describe
from kimigraph.ir.row_products import RowProduct, row_products


@dataclass(frozen=True)
class Tiling:
    """How the kernel is cut: columns a program in 16 bits, elements a step in 16 and in 32 bits, warps, stages."""

    columns: int
    step: int
    wide_step: int
    warps: int
    stages: int = 3


@dataclass(frozen=True)
class Member:
    """One product in the kernel: its names there, the function that computes a tile, and how many tiles it has."""

    product: RowProduct
    weight: str
    out: str
    function: str
    arguments: dict[str, int]
    tiles: int


def build_region(child: GraphModule, tiling: Tiling | None = None) -> KernelModule:
    """The kernel of a region of products; ``launch`` takes its inputs in order and returns its results.

    Raises CompileError where the region holds anything else.
    """
    found = row_products(child)
    if found is None:
        raise CompileError(
            "a horizontal region holds more than products of the same few rows, and no kernel can be generated for it:"
            " compile with --disable-pass merge-horizontal"
        )
    chosen = tiling or tiling_for(found)
    members = [_member(number, product, chosen) for number, product in enumerate(found)]
    # Fewest tiles first: they are the longest, fp32 columns that one program reads from end to end.
    table = sorted(members, key=lambda member: member.tiles)
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    functions = template_functions({member.function for member in members} | {"narrow"})
    parts = [HEAD.format(options=options).strip(), *functions, _kernel(table), _launch(child, members, table)]
    return KernelModule("\n\n\n".join(parts) + "\n", (_record(members, options),))


def tiling_for(products: list[RowProduct]) -> Tiling:
    """What measured best on an H200: tiles enough to fill it several times over, steps long enough to hide latency."""
    columns = sum(product.columns for product in products)
    if products[0].rows > 1:
        return Tiling(64, 128, 512, 4, 3) if columns >= 8192 else Tiling(32, 128, 512, 4, 5)
    if columns >= 4096:
        return Tiling(8, 256, 256, 8)
    return Tiling(2, 1024, 1024, 2) if products[0].depth > 4096 else Tiling(2, 512, 512, 4)


def _member(number: int, product: RowProduct, tiling: Tiling) -> Member:
    weight, out = f"weight_{number}", f"out_{number}"
    shape = {"COLUMNS": product.columns, "DEPTH": product.depth}
    if product.rows == 1:
        tile = tiling.columns if product.narrow else max(tiling.columns // 2, 1)
        step = min(tiling.step if product.narrow else tiling.wide_step, padded(product.depth))
        return Member(
            product, weight, out, "one_row", {**shape, "TILE": tile, "STEP": step}, ceil_div(product.columns, tile)
        )
    rows = {"ROWS": product.rows, "ROW_STRIDE": product.row_stride, **shape}
    if not product.narrow:
        arguments = {**rows, "LINES": padded(product.rows), "STEP": min(tiling.wide_step, padded(product.depth))}
        return Member(product, weight, out, "few_rows", arguments, product.columns)
    step = max(min(tiling.step, padded(product.depth)), 16)
    arguments = {**rows, "TILE": tiling.columns, "LINES": padded(product.rows, 16), "STEP": step}
    return Member(product, weight, out, "few_rows_dot", arguments, ceil_div(product.columns, tiling.columns))


def _kernel(table: list[Member]) -> str:
    """The kernel: a branch for each weight over the number of the program."""
    operands = [f"    rows,  # {_row_form(table[0].product)}"]
    for member in sorted(table, key=lambda member: member.weight):
        operands += [f"    {member.weight},  # {describe(member.product.weight.meta['val'])}"]
        operands += [f"    {member.out},  # {describe(member.product.node.meta['val'])}"]
    lines = ["@triton.jit", "def products(", *operands, "    INTERPRET: tl.constexpr,", "):"]
    lines += [
        f'    """{"; ".join(f"{m.tiles:,} tiles of {m.weight}" for m in table)}."""',
        "    tile = tl.program_id(0)",
    ]
    begin = 0
    for number, member in enumerate(table):
        end = begin + member.tiles
        last = number == len(table) - 1
        lines.append(
            ("    else:" if last else f"    {'if' if not number else 'elif'} tile < {end}:")
            if len(table) > 1
            else "    if True:"
        )
        named = ", ".join(f"{name}={value}" for name, value in member.arguments.items())
        place = f"tile - {begin}" if begin else "tile"
        lines.append(f"        {member.function}(")
        lines.append(f"            {place}, rows, {member.weight}, {member.out},")
        lines.append(f"            {named}, INTERPRET=INTERPRET,")
        lines.append("        )  # fmt: skip")
        begin = end
    return "\n".join(lines)


def _row_form(product: RowProduct) -> str:
    return f"{product.rows} x {product.depth:,} elements, {describe(product.source.meta['val'])}"


def _launch(child: GraphModule, members: list[Member], table: list[Member]) -> str:
    """``launch``: the region's inputs in order, under the kernel's names."""
    names = {member.product.weight: member.weight for member in members} | {members[0].product.source: "rows"}
    inputs = [node for node in child.graph.nodes if node.op == "placeholder"]
    parameters = [names[node] for node in inputs]
    lines = [
        f"def launch({', '.join(parameters)}, *, memory=torch):",
        '    """The region\'s inputs in order -> its results."""',
    ]
    for member in members:
        value = member.product.node.meta["val"]
        lines.append(f"    {member.out} = memory.empty({tuple(value.shape)}, dtype={value.dtype}, device=rows.device)")
    operands = ", ".join(["rows", *(f"{member.weight}, {member.out}" for member in members)])
    grid = sum(member.tiles for member in table)
    lines.append(f"    products[({grid},)]({operands}, INTERPRET=INTERPRET, **OPTIONS)")
    results: Any = next(iter(reversed(child.graph.nodes))).args[0]
    outs = {member.product.node: member.out for member in members}
    returned = outs[results] if isinstance(results, Node) else f"({', '.join(outs[node] for node in results)},)"
    return "\n".join([*lines, f"    return {returned}"])


def _record(members: list[Member], options: dict[str, Any]) -> KernelLaunch:
    """The launch for an ahead-of-time build."""
    given: dict[str, torch.Tensor] = {"rows": members[0].product.source.meta["val"]}
    for member in members:
        given |= {member.weight: member.product.weight.meta["val"], member.out: member.product.node.meta["val"]}
    types = {name: "*" + TRITON_TYPES[str(value.dtype).removeprefix("torch.")] for name, value in given.items()}
    divisible = tuple(
        name for name, value in given.items() if int(value.storage_offset()) * value.element_size() % 16 == 0
    )
    return KernelLaunch("products", types, {"INTERPRET": False}, divisible, options)
