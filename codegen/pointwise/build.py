"""The kernel file of a pointwise region: helpers, the kernel, its constants and ``launch``."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kimigraph.codegen.kernel import KernelLaunch, KernelModule
from kimigraph.codegen.pointwise.body import Body
from kimigraph.codegen.pointwise.expressions import HELPERS
from kimigraph.codegen.pointwise.names import Names
from kimigraph.codegen.pointwise.product_body import ProductBody
from kimigraph.codegen.pointwise.product_tiles import ProductTiles, product_tiles_for
from kimigraph.codegen.pointwise.tiles import Tiles, tiles_for
from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import describe
from kimigraph.ir.pointwise import Loops, Unfusable, lower
from kimigraph.ir.purity import mutated_arguments

_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
AnyTiles = Tiles | ProductTiles
DEVICE = '"cpu" if INTERPRET else "cuda"'
"""Where a region without inputs (positions, a mask of them) has its results: on the device that is current."""
_MATH = Path(__file__).parent.parent / "templates" / "pointwise_math.py"


def build_region(child: GraphModule, tiles: AnyTiles | None = None) -> KernelModule:
    """The kernel of a region, from the graph module that it runs; ``launch`` takes its inputs and returns its results.

    Raises CompileError where the region is no single loop nest.
    """
    nodes = list(child.graph.nodes)
    results: Any = nodes[-1].args[0]
    inputs = [node for node in nodes if node.op == "placeholder"]
    members = [node for node in nodes if node.op not in ("placeholder", "output")]
    return build_nodes(members, results, inputs, tiles)


def build_nodes(
    members: Sequence[Node],
    results: Node | Sequence[Node],
    inputs: Sequence[Node | None],
    tiles: AnyTiles | None = None,
) -> KernelModule:
    """The same from nodes of any graph: ``results`` is what ``launch`` returns, one or several.

    ``launch`` takes ``inputs`` in order; an argument that the call lacks is None there and has no name.
    """
    outputs = [results] if isinstance(results, Node) else list(results)
    try:
        loops = lower(members, outputs)
    except Unfusable as reason:
        raise CompileError(
            f"no kernel can be generated for this region: {reason.reason} (node {reason.node.name});"
            " compile with --disable-pass fuse-pointwise"
        ) from reason
    chosen = tiles or (product_tiles_for(loops) if loops.depths else tiles_for(loops))
    text = _text(loops, chosen, Names(loops, canonical=False), inputs, results)
    return KernelModule(
        text,
        (_launch_record(loops, chosen),),
        identity=_text(loops, chosen, Names(loops, canonical=True), inputs, results),
    )


def _text(loops: Loops, tiles: AnyTiles, names: Names, inputs: Sequence[Node | None], results: Any) -> str:
    arguments: list[str] = []
    for node in inputs:  # what is not read is passed all the same, and so is None where an operator lacks an operand
        if node is not None and node in names.buffers:
            arguments.append(names.buffers[node])
        else:
            arguments.append(names.local("unused" if names.canonical or node is None else f"unused_{node.name}"))
    body = _body(loops, tiles, names)
    constants = {"pointwise": tiles.constants(loops), "options": tiles.options()}
    helpers = _helpers(body)
    parts = [
        "import os\nfrom typing import Any\n\nimport torch\nimport triton\nimport triton.language as tl\n\n"
        'INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"\n'
        f"{_table(constants)}",
        *helpers,
        "\n".join([*_signature(loops, tiles, names), *body]),
        "\n".join(_launch(loops, tiles, names, arguments, results)),
    ]
    return "\n\n\n".join(parts) + "\n"


def _body(loops: Loops, tiles: AnyTiles, names: Names) -> list[str]:
    if isinstance(tiles, ProductTiles):
        return ProductBody(loops, tiles, names).statements()
    return Body(loops, tiles, names).statements()


def _table(constants: dict[str, dict[str, Any]]) -> str:
    rows: list[str] = []
    for name, values in constants.items():
        items = ", ".join(f'"{key}": {value!r}' for key, value in values.items())
        rows.append(f'    "{name}": {{{items}}},')
    return "\n".join(["CONSTANTS: dict[str, Any] = {", *rows, "}"])


def _helpers(body: Sequence[str]) -> list[str]:
    """The functions that the body calls and those that these call, as the file of them has them."""
    source = _MATH.read_text(encoding="utf-8")
    lines, text = source.splitlines(), "\n".join(body)
    wanted = (
        "round_to_bf16",
        "plus_product",
        "ask_for",
        "start_next_launch",
        "await_earlier_launch",
        *HELPERS.values(),
    )
    found: list[str] = []
    for node in reversed(ast.parse(source).body):  # a function stands behind what it calls
        if isinstance(node, ast.FunctionDef) and node.name in wanted and f"{node.name}(" in text:
            found.append("\n".join(lines[node.decorator_list[0].lineno - 1 : node.end_lineno]))
            text += found[-1].partition("\n")[2].partition("\n")[2]
    return found[::-1]


def _kernel_buffers(loops: Loops, names: Names) -> list[tuple[str, Node]]:
    """Parameters of the kernel: what it reads or writes of the inputs, then the new tensors."""
    given = [(names.buffers[node], node) for node in loops.buffers]
    return given + [(names.results[node], node) for node in loops.results]


def _signature(loops: Loops, tiles: AnyTiles, names: Names) -> list[str]:
    parameters = [f"    {name},  # {_described(node)}" for name, node in _kernel_buffers(loops, names)]
    constants = [f"    {name}: tl.constexpr," for name in tiles.constants(loops)]
    shape = (
        f"{loops.rows:,} elements" if loops.columns is None else f"{loops.rows:,} rows of {loops.columns:,} elements"
    )
    if loops.depths:
        depths = " and ".join(f"{depth.extent:,}" for depth in loops.depths)
        shape = f"{loops.rows:,} columns of products of {loops.lines} x {depths} elements"
    return ["@triton.jit", "def pointwise(", *parameters, *constants, "):", f'    """{shape}."""']


def _described(node: Node) -> str:
    value = node.meta["val"]
    return describe(value) + ("" if value.is_contiguous() else f", strides {tuple(value.stride())}")


def _launch(loops: Loops, tiles: AnyTiles, names: Names, arguments: Sequence[str], results: Any) -> list[str]:
    arguments = [*arguments, "*", "memory=torch"] if loops.results else arguments
    lines = [f"def launch({', '.join(arguments)}):"]
    if len(lines[0]) > 120:
        lines = ["def launch(", *(f"    {argument}," for argument in arguments), "):"]
    lines.append('    """The region\'s inputs in order -> its results; what it writes changes in place."""')
    given = next(iter(names.buffers.values()), None)
    device = f"{given}.device" if given else DEVICE
    for node in loops.results:
        value = node.meta["val"]
        shape, stride = tuple(value.shape), tuple(value.stride())
        lines.append(
            f"    {names.results[node]} = memory.empty_strided({shape}, {stride}, dtype={value.dtype}, device={device})"
        )
    arguments = ", ".join(name for name, _ in _kernel_buffers(loops, names))
    lines += [
        f"    pointwise[({tiles.programs(loops)},)](",
        f"        {arguments},",
        '        **{**CONSTANTS["pointwise"], "INTERPRET": INTERPRET}, **CONSTANTS["options"],',
        "    )  # fmt: skip",
    ]
    returned = [_returned(node, names) for node in ([results] if isinstance(results, Node) else results)]
    several = f"({', '.join(returned)}{',' if len(returned) == 1 else ''})"
    return [*lines, f"    return {returned[0] if isinstance(results, Node) else several}"]


def _returned(node: Node, names: Names) -> str:
    """A new tensor, or the input that a write changed."""
    written = mutated_arguments(node)
    return names.buffers[written[0]] if written else names.results[node]


def _launch_record(loops: Loops, tiles: AnyTiles) -> KernelLaunch:
    names = Names(loops, canonical=False)
    types: dict[str, str] = {}
    divisible: list[str] = []
    for name, node in _kernel_buffers(loops, names):
        value = node.meta["val"]
        types[name] = "*" + _TYPES[value.dtype]
        fresh = node not in loops.buffers
        if fresh or int(value.storage_offset()) * value.element_size() % 16 == 0:
            divisible.append(name)
    return KernelLaunch("pointwise", types, tiles.constants(loops), tuple(divisible), tiles.options())
