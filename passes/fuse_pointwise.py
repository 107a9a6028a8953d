"""``fuse-pointwise``: what is left between the large operators becomes regions, for each of which one kernel is made.

Elementwise chains, reductions along one extent with what surrounds them, joins, gathers and writes; views are
arithmetic on addresses. A product of few rows takes in what is done to its rows before and to its columns after.
``kimigraph.ir.pointwise`` says what one kernel can hold, ``kimigraph.ir.cost`` what it saves.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from kimigraph.ir import purity
from kimigraph.ir.cost import fused_work, work_of
from kimigraph.ir.device import Device
from kimigraph.ir.launches import graph_launches, launches_of
from kimigraph.ir.pointwise.prepared import may_be_held
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.regions import extract_region
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.pointwise.border import with_views_inside, with_views_outside
from kimigraph.passes.pointwise.grow import Growth
from kimigraph.passes.pointwise.holes import fill_holes
from kimigraph.passes.pointwise.opened import open_regions
from kimigraph.passes.pointwise.order import Order, Unit
from kimigraph.passes.pointwise.positions import settle, sink, spread

NEAR_MISSES = 20
"""At most so many refusals are remarked on."""


@dataclass(frozen=True)
class FusePointwise(Pass):
    """Makes regions of pointwise work.

    Options: ``most``, the largest number of nodes of a region; ``products``, whether products of few rows join them;
    ``lone``, whether such a product is generated that nothing joins; ``prepares``, with how many weights long rows and
    attention residuals may be multiplied in the kernel that prepares them.
    """

    name: ClassVar[str] = "fuse-pointwise"
    summary: ClassVar[str] = (
        "elementwise work, reductions, views and writes between large operators become one kernel each"
    )
    fusion: ClassVar[bool] = True
    level: ClassVar[int] = 2
    pattern: ClassVar[str] = (
        "neighbours out of elementwise operations, reductions over one extent (norms, softmax), joins and splits, "
        "gathers, casts and writes in place; products of few rows with what surrounds them; the product that gives a "
        "`kda_decode`'s gate logits, and the sum behind a `moe_experts`"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "all results have the same number of elements, or one for each reduced row",
        "all reductions run over equally many elements, at most 65,536",
        "nothing outside lies between the parts, and no write changes places with another use",
        "bool, integers, bfloat16, float16 or float32",
        "products join with up to 8 rows: what is done to their columns, their sums, what prepares their rows where a "
        "program can hold the rows (8,192 elements); rows of 4,096 and attention residuals for one weight",
        "a gate's product is at most 256 deep and used for nothing else; the sum is of the experts' shape and type",
        "positions and counters, a few integers of inputs that the step does not write, are computed in each region",
        "the cost model prices one kernel below several",
    )
    effect: ClassVar[str] = (
        "`pointwise` regions: calls of child graphs, for each of which one Triton kernel is generated; operands of the "
        "large operators"
    )

    most: int = 64
    products: bool = True
    lone: bool = True
    prepares: int = 1

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Grow regions over the whole graph, then make each a child graph."""
        graph = program.graph_module.graph
        before = graph_launches(graph)
        filled = list(fill_holes(graph, self.name, context)) if self.products else []
        copies = spread(graph)
        changed = sink(graph) or bool(copies)
        opened = open_regions(program.graph_module, may_be_held) if self.products and self.prepares > 1 else []
        growth = Growth(Order.of(graph), context.device, self.most, self.products, self.prepares, self.lone)
        units = growth.run(graph)
        remarks = [*filled, *(refused.remark(self.name, node) for node, refused in growth.misses[:NEAR_MISSES])]
        kept = [unit for unit in units if context.allow(_described(unit))]
        if kept:
            growth.order.apply()
        taken = {node for unit in kept for node in unit.nodes}
        settle(copies, taken)
        for region in opened:
            if not taken & set(region.nodes):
                region.close(program.graph_module)
        if not kept and not any(remark.kind == "passed" for remark in filled):
            return PassResult(changed, tuple(remarks), {"regions": 0})
        remarks += [self._make(program, unit, context.device) for unit in kept]
        erased = purity.dead_code(graph)
        graph.lint()
        program.graph_module.recompile()
        saved = before - graph_launches(graph)
        return PassResult(True, tuple(remarks), {"regions": len(kept), "launches saved": saved, "erased": erased})

    def _make(self, program: CapturedProgram, unit: Unit, device: Device) -> Remark:
        """Move a unit into a region; the remark that says what it saves."""
        graph = program.graph_module.graph
        members = with_views_inside(graph, with_views_outside(graph, unit.nodes))
        apart = [work_of(node) for node in members if launches_of(node)]
        together = fused_work(members)
        source, module = source_line(members[-1]), module_path(members[-1])
        name = _free_name(program)
        replaced = tuple(dict.fromkeys(n for node in members for n in node.meta.get("replaces", (node.name,))))
        call = extract_region(program.graph_module, members, name, "pointwise")
        call.meta["replaces"] = replaced
        _mark_constants(program, call)
        seconds = sum(work.seconds(device) for work in apart)
        fewer = sum(work.bytes for work in apart) - together.bytes
        message = (
            f"{replaced[0]} became {call.name}: a product of few rows, of which a library may make two launches"
            if len(apart) == 1
            else f"{len(members)} nodes became {call.name}: {len(apart) - 1} launches and {fewer:,} bytes fewer, "
            f"{together.seconds(device) * 1e6:.2f} us instead of {seconds * 1e6:.2f} us on {device.name}"
        )
        return Remark(
            kind="passed",
            pass_name=self.name,
            message=message,
            node=call.name,
            source=source,
            nodes=(*replaced, call.name),
            score=len(apart),
            module=module,
        )


def _mark_constants(program: CapturedProgram, call: Node) -> None:
    """Say of a region's inputs which no step writes: a launch may read those before earlier ones have ended."""
    own = {spec.name for spec in program.inputs if spec.kind in ("weight", "constant") and not spec.mutated}
    child = purity.region_module(call)
    inner = [node for node in child.graph.nodes if node.op == "placeholder"] if child is not None else []
    for placeholder, given in zip(inner, call.args, strict=True):
        if isinstance(given, Node):
            root = purity.storage_root(given)
            placeholder.meta["constant"] = root.name in own or bool(root.meta.get("prepared"))


def _described(unit: Unit) -> str:
    last = unit.nodes[-1]
    return f"{last.name} ({source_line(last) or 'no source line'})"


def _free_name(program: CapturedProgram) -> str:
    number = 0
    while hasattr(program.graph_module, f"pointwise_{number}"):
        number += 1
    return f"pointwise_{number}"
