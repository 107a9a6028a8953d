"""``merge-horizontal``: like operators with different operands become one launch.

Products with weights that share their left operand become one product with the weights side by side, concatenated once
when the program is bound. What then still reads the same few rows, in another type, becomes one kernel over a table of
tiles. Legal where no product waits for another, by data or by the order of reads and writes; done where it pays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import Node

from kimigraph.ir import purity
from kimigraph.ir.dependences import Dependences
from kimigraph.ir.launches import launches_of
from kimigraph.ir.operators import operator_of
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.ir.row_products import is_cast_alone
from kimigraph.passes.algebra.nodes import packet
from kimigraph.passes.algebra.products import Product, products
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.merging.few_rows import independent, make_region, row_groups
from kimigraph.passes.merging.lookups import lookups
from kimigraph.passes.merging.side_by_side import merge_products, plan_for


@dataclass(frozen=True)
class MergeHorizontal(Pass):
    """Computes products that share their left operand as one."""

    name: ClassVar[str] = "merge-horizontal"
    summary: ClassVar[str] = "like operators with different operands become one launch"
    level: ClassVar[int] = 2
    fusion: ClassVar[bool] = True
    pattern: ClassVar[str] = "products of the same rows with several weights"
    constraints: ClassVar[tuple[str, ...]] = (
        "no product waits for another, by data or by the order of reads and writes",
        "side by side: equal types, all with a bias or none, weights that no step updates, results that the step "
        "neither returns nor writes into, parts that begin at multiples of 16 bytes",
        "in one kernel: at most 8 rows; other types only without bias and, with several rows, up to 512 columns",
        "a norm of 2 to 8 rows that are looked up in a table joins the product that alone reads it, in 16 bits",
        "faster together by the cost model, copies of parts that must be contiguous included",
    )
    effect: ClassVar[str] = (
        "`linear` or `matmul` with the weights side by side, concatenated when the program is bound; where types "
        "differ a region, for which one kernel is generated"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Merge what becomes one product, then what becomes one kernel."""
        remarks = [
            *self._cast_once(program),
            *self._side_by_side(program, context),
            *self._few_rows(program, context),
            *self._looked_up(program, context),
        ]
        merged = sum(remark.kind == "passed" for remark in remarks)
        erased = purity.dead_code(program.graph_module.graph) if merged else 0
        if merged:
            program.graph_module.graph.lint()
            program.graph_module.recompile()
        return PassResult(merged > 0, tuple(remarks), {"merged": merged, "erased": erased})

    def _cast_once(self, program: CapturedProgram) -> Iterator[Remark]:
        """Casts of weights that a kernel takes as they are happen when the program is bound."""
        own = {spec.name for spec in program.inputs if spec.kind == "weight" and not spec.mutated}
        for node in program.graph_module.graph.nodes:
            weight = node.args[0] if is_cast_alone(node) else None
            if isinstance(weight, Node) and weight.name in own and all(map(_takes_as_is, node.users)):
                node.meta["prepared"] = True
                yield Remark("note", self.name, f"{node.name} is computed when the program is bound", node.name)

    def _side_by_side(self, program: CapturedProgram, context: PassContext) -> Iterator[Remark]:
        graph = program.graph_module.graph
        groups: dict[tuple[Any, ...], list[Product]] = {}
        for product in products(list(graph.nodes), {spec.name: spec for spec in program.inputs}):
            groups.setdefault(product.key, []).append(product)
        dependences = Dependences(graph)
        for group in groups.values():
            misses: list[Refused] = []
            plan = None
            try:
                plan = plan_for(group, dependences, context.device, misses.append)
            except Refused as refusal:
                misses.append(refusal)
            for refusal in misses:
                yield refusal.remark(self.name, group[0].node)
            if plan is None or not context.allow(_described(plan.members[0].node)):
                continue
            nodes = [member.node for member in plan.members]
            dependences.merge(nodes)
            place = _Place.of(nodes)
            yield place.remark(self.name, merge_products(graph, plan), plan.describe())

    def _few_rows(self, program: CapturedProgram, context: PassContext) -> Iterator[Remark]:
        graph, device = program.graph_module.graph, context.device
        dependences = Dependences(graph)
        for found in row_groups(list(graph.nodes)):
            group = independent(found, dependences)
            if group is None:
                continue
            apart, together = group.apart(device), group.together()
            prices = f"{apart * 1e6:.2f} us apart, {together.describe(device)} together on {device.name}"
            if together.seconds(device) >= apart:
                refusal = Refused(f"one kernel does not pay: {prices}", group.products[0].node, 1)
                yield refusal.remark(self.name, group.products[0].node)
                continue
            if not context.allow(_described(group.products[0].node)):
                continue
            nodes = [product.node for product in group.products]
            dependences.merge(nodes)
            place = _Place.of(group.nodes)
            yield place.remark(self.name, make_region(program.graph_module, group, _free_name(program)), prices)

    def _looked_up(self, program: CapturedProgram, context: PassContext) -> Iterator[Remark]:
        """Rows of a table, their norm and the product of these."""
        for lookup in lookups(list(program.graph_module.graph.nodes)):
            apart, together = lookup.apart(context.device), lookup.together(context.device)
            prices = (
                f"{apart * 1e6:.2f} us apart, {together * 1e6:.2f} us together with"
                f" {context.device.wait_seconds * 1e6:.2f} us until all programs see the normed rows on"
                f" {context.device.name}"
            )
            if together >= apart:
                refusal = Refused(f"one kernel does not pay: {prices}", lookup.members[-1], 1)
                yield refusal.remark(self.name, lookup.members[-1])
            elif context.allow(_described(lookup.members[-1])):
                place = _Place.of(lookup.members)
                yield place.remark(self.name, lookup.make_region(program.graph_module, _free_name(program)), prices)


@dataclass(frozen=True)
class _Place:
    """What a remark says of nodes that are about to vanish."""

    names: tuple[str, ...]
    source: str
    module: str

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> "_Place":
        return cls(tuple(node.name for node in nodes), source_line(nodes[-1]), module_path(nodes[-1]))

    def remark(self, pass_name: str, node: Node, prices: str) -> Remark:
        message = f"{', '.join(self.names)} became {node.name}: {prices}"
        nodes = (*self.names, node.name)
        return Remark("passed", pass_name, message, node.name, self.source, nodes, score=1, module=self.module)


def _takes_as_is(user: Node) -> bool:
    """Whether a kernel of its own reads the operand, or a view of it: a generated one would cast on the way."""
    if user.op == "call_function" and not launches_of(user):
        return bool(user.users) and all(map(_takes_as_is, user.users))
    return operator_of(user) is not None or packet(user) in ("linear", "mm", "bmm", "matmul")


def _described(node: Node) -> str:
    return f"{node.name} ({source_line(node) or 'no source line'})"


def _free_name(program: CapturedProgram) -> str:
    number = 0
    while hasattr(program.graph_module, f"horizontal_{number}"):
        number += 1
    return f"horizontal_{number}"
