"""Rows of a table, their norm and the product of the normed rows as one kernel."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from kimigraph.codegen.horizontal.head import HEAD, template_functions
from kimigraph.codegen.kernel import KernelLaunch, KernelModule
from kimigraph.codegen.specialize.rendering import TRITON_TYPES, ceil_div, padded
from kimigraph.ir.normed_lookup import NormedLookup, normed_lookup

KERNEL = "normed_lookup_dot"
PIECE = 1024
"""Elements of each row that are squared at a time."""


def lookup_of(child: GraphModule) -> NormedLookup | None:
    """What a region computes if it is such a product."""
    found = (normed_lookup(node) for node in child.graph.nodes if node.op == "call_function")
    return next(filter(None, found), None)


def build_lookup(child: GraphModule, found: NormedLookup) -> KernelModule:
    """The kernel; ``launch`` takes the region's inputs in order and returns its results."""
    product = found.product
    tile = 64 if product.columns >= 8192 else 32
    constants = {
        "ROWS": product.rows,
        "COLUMNS": product.columns,
        "DEPTH": product.depth,
        "TILE": tile,
        "LINES": padded(product.rows, 16),
        "STEP": max(min(128, padded(product.depth)), 16),
        "FEW": padded(product.rows),
        "PIECE": min(PIECE, padded(product.depth)),
        "EPS": float(found.eps),
        "ROUNDS_FIRST": bool(found.rounds_first),
    }
    options = {"num_warps": 4, "num_stages": 3 if tile == 64 else 5}
    operands = {"table": found.table, "places": found.places, "norm": found.weight, "weight": product.weight}
    results = {"found": found.lookup, "out": product.node}
    parts = [HEAD.format(options=options).strip(), *template_functions({"narrow", KERNEL})]
    parts.append(_launch(child, operands, results, constants, ceil_div(product.columns, tile)))
    given = {name: node.meta["val"] for name, node in (operands | results).items()}
    record = KernelLaunch(
        KERNEL,
        {name: "*" + TRITON_TYPES[str(value.dtype).removeprefix("torch.")] for name, value in given.items()},
        {**constants, "INTERPRET": False},
        tuple(name for name, value in given.items() if int(value.storage_offset()) * value.element_size() % 16 == 0),
        options,
    )
    return KernelModule("\n\n\n".join(parts) + "\n", (record,))


def _launch(
    child: GraphModule, operands: dict[str, Node], results: dict[str, Node], constants: dict[str, Any], grid: int
) -> str:
    names = {node: name for name, node in operands.items()}
    inputs = [names[node] for node in child.graph.nodes if node.op == "placeholder"]
    lines = [f"def launch({', '.join(inputs)}, *, memory=torch):"]
    lines.append('    """The region\'s inputs in order -> its results."""')
    for name, node in results.items():
        value: torch.Tensor = node.meta["val"]
        shape = tuple(value.shape)
        lines.append(f"    {name} = memory.empty({shape}, dtype={value.dtype}, device=weight.device)")
    lines.append(f"    {KERNEL}[({grid},)](")
    lines.append(f"        {', '.join([*operands, *results])},")
    named = ", ".join(f"{name}={value}" for name, value in constants.items())
    lines.append(f"        {named}, INTERPRET=INTERPRET, **OPTIONS,")
    lines.append("    )  # fmt: skip")
    returned: Any = next(iter(reversed(child.graph.nodes))).args[0]
    outs = {node: name for name, node in results.items()}
    text = outs[returned] if isinstance(returned, Node) else f"({', '.join(outs[node] for node in returned)},)"
    return "\n".join([*lines, f"    return {text}"])
