"""Rows of a table, their norm and the product of the normed rows as one kernel."""

from typing import Any

from torch.fx import GraphModule, Node

from kimigraph.codegen.kernel import KernelLaunch, KernelModule
from kimigraph.codegen.specialize.rendering import TRITON_TYPES, ceil_div, padded, render
from kimigraph.ir.normed_lookup import NormedLookup, normed_lookup

KERNEL = "normed_lookup_dot"


def lookup_of(child: GraphModule) -> NormedLookup | None:
    """What a region computes if it is such a product."""
    found = (normed_lookup(node) for node in child.graph.nodes if node.op == "call_function")
    return next(filter(None, found), None)


def build_lookup(child: GraphModule, found: NormedLookup) -> KernelModule:
    """The kernel; ``launch`` takes the region's inputs in order and returns its results."""
    product = found.product
    tile = 64 if product.columns >= 8192 else 32
    programs = ceil_div(product.columns, tile)
    constants = {
        "ROWS": product.rows,
        "COLUMNS": product.columns,
        "DEPTH": product.depth,
        "PROGRAMS": programs,
        "TILE": tile,
        "LINES": padded(product.rows, 16),
        "STEP": max(min(128, padded(product.depth)), 16),
        "BLOCK": padded(product.depth),
        "EPS": float(found.eps),
        "ROUNDS_FIRST": bool(found.rounds_first),
    }
    options = {"num_warps": 4, "num_stages": 4 if tile == 64 else 5}
    sizes = {
        "found": tuple(found.lookup.meta["val"].shape),
        "out": tuple(product.node.meta["val"].shape),
        "rows": (product.rows, product.depth),
    }
    whole = {"sizes": sizes, "grid": (programs,), "options": options, KERNEL: constants}
    text = render("normed_lookup", whole) + "\n\n" + _launch(child, found)
    return KernelModule(text, (_record(found, constants, options),))


def _record(found: NormedLookup, constants: dict[str, Any], options: dict[str, Any]) -> KernelLaunch:
    """The launch for an ahead-of-time build."""
    nodes = {"table": found.table, "places": found.places, "norm": found.weight, "weight": found.product.weight}
    given = {name: node.meta["val"] for name, node in nodes.items()}
    types = {name: "*" + TRITON_TYPES[str(value.dtype).removeprefix("torch.")] for name, value in given.items()}
    own = {**dict.fromkeys(("found", "out", "rows"), types["table"]), "counts": "*i64"}
    aligned = [name for name, value in given.items() if int(value.storage_offset()) * value.element_size() % 16 == 0]
    return KernelLaunch(KERNEL, types | own, {**constants, "INTERPRET": False}, (*aligned, *own), options)


def _launch(child: GraphModule, found: NormedLookup) -> str:
    names = {found.table: "table", found.places: "places", found.weight: "norm", found.product.weight: "weight"}
    inputs = [names[node] for node in child.graph.nodes if node.op == "placeholder"]
    returned: Any = next(iter(reversed(child.graph.nodes))).args[0]
    results = {found.lookup: "found", found.product.node: "out"}
    text = results[returned] if isinstance(returned, Node) else f"({', '.join(results[node] for node in returned)},)"
    return f'''def launch({", ".join(inputs)}, *, memory=torch):
    """The region's inputs in order -> its results."""
    found, out = look_up(table, places, norm, weight, memory=memory)
    return {text}
'''
