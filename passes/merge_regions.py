"""``merge-regions``: pointwise regions that do not wait for one another become one launch over a table of tiles.

Norms of different widths, gates and scales of several branches, writes of new rows into caches of several kinds: each
is a kernel of its own only because its operands differ. Legal where none waits for another, by data or by the order of
reads and writes; done where a launch counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from kimigraph.ir.branches import common_branch
from kimigraph.ir.cost import fused_work, serial_seconds, work_of
from kimigraph.ir.dependences import Dependences
from kimigraph.ir.device import Device
from kimigraph.ir.launches import launches_of
from kimigraph.ir.operators import operator_of
from kimigraph.ir.pointwise.loops import is_known, stands_alone
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.regions import extract_region
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.dependences import make_neighbours
from kimigraph.passes.base import Pass, PassContext

LEAST_GAIN = 0.1
"""What a merge must save of the time of its members: the cost model does not see what sharing a kernel costs them."""

SMALL = 1 << 20
"""Bytes that a member may move below -O3: so little is all launch and latency, of which merging can only save."""

WRITERS = ("latent_write", "index_key_write")
"""Operators with a program a row, whose kernels can share a launch."""

OPEN_GROUPS = 4
"""How many groups, the latest ones, a region may join: values should not live longer than they must."""


@dataclass(frozen=True)
class MergeRegions(Pass):
    """Merges pointwise regions, single pointwise operations and writes of cache rows.

    Options: ``most``, the largest number of members of one launch.
    """

    name: ClassVar[str] = "merge-regions"
    summary: ClassVar[str] = "pointwise regions that do not wait for one another become one launch"
    level: ClassVar[int] = 2
    pattern: ClassVar[str] = (
        "pointwise regions or operations with operands of their own (norms of other widths, gates), `latent_write`, "
        "`index_key_write`"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "none waits for another, by data or by the order of reads and writes",
        "merging saves at least a tenth of their time by the cost model",
        "below -O3 each moves at most 1 MiB",
    )
    effect: ClassVar[str] = "a region for which one kernel with a table of tiles is generated"

    most: int = 8

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Group greedily in graph order, then make each group a region."""
        graph = program.graph_module.graph
        small = SMALL if context.config.opt_level < 3 else None
        groups = [group for group in self._groups(graph, context.device, small) if len(group) > 1]
        remarks: list[Remark] = []
        for group in groups:
            if context.allow(f"{group[0].name} ({source_line(group[0]) or 'no source line'})"):
                remarks.append(self._merge(program, group, context.device))
        if remarks:
            graph.lint()
            program.graph_module.recompile()
        saved = sum(len(remark.nodes) - 2 for remark in remarks)
        return PassResult(bool(remarks), tuple(remarks), {"merged": len(remarks), "launches saved": saved})

    def _groups(self, graph: Graph, device: Device, most_bytes: int | None) -> list[list[Node]]:
        dependences = Dependences(graph)
        groups: list[list[Node]] = []
        for node in graph.nodes:
            if not _is_candidate(node) or (most_bytes is not None and work_of(node).bytes > most_bytes):
                continue
            for group in reversed(groups[-OPEN_GROUPS:]):
                members = [*group, node]
                apart = len(group) >= self.most or common_branch(members) is None
                if not apart and dependences.path(members) is None and _pays(members, device):
                    dependences.merge(members)
                    group.append(node)
                    break
            else:
                groups.append([node])
        return groups

    def _merge(self, program: CapturedProgram, group: Sequence[Node], device: Device) -> Remark:
        graph_module = program.graph_module
        names = tuple(node.name for node in group)
        source, module = source_line(group[0]), module_path(group[0])
        apart = serial_seconds(map(work_of, group), device)
        together = fused_work(group)
        members = [_as_region(program, node) for node in group]
        members += [item for call in members for item in _items(call)]
        make_neighbours(members)
        call = extract_region(graph_module, members, _free_name(program, "horizontal"), "horizontal")
        message = (
            f"{', '.join(names)} became {call.name}: {apart * 1e6:.2f} us apart, {together.describe(device)} together"
            f" on {device.name}"
        )
        return Remark("passed", self.name, message, call.name, source, (*names, call.name), score=1, module=module)


def _is_candidate(node: Node) -> bool:
    """Whether the node is a pointwise region, would be one by itself, or writes rows into a cache."""
    if node.op == "call_module":
        return node.meta.get("region") == "pointwise"
    if _writes_rows(node):
        return True
    return launches_of(node) > 0 and is_known(node) and bool(node.all_input_nodes) and stands_alone(node)


def _writes_rows(node: Node) -> bool:
    operator = operator_of(node)
    return operator is not None and operator.name in WRITERS


def _pays(group: Sequence[Node], device: Device) -> bool:
    apart = serial_seconds(map(work_of, group), device)
    return apart - fused_work(group).seconds(device) >= LEAST_GAIN * apart


def _as_region(program: CapturedProgram, node: Node) -> Node:
    if node.op == "call_module" or _writes_rows(node):
        return node
    return extract_region(program.graph_module, [node], _free_name(program, "pointwise"), "pointwise")


def _items(call: Node) -> Iterator[Node]:
    """What takes the results of a region with several apart: it goes where the region goes."""
    if isinstance(call.meta.get("val"), tuple | list):
        yield from call.users


def _free_name(program: CapturedProgram, kind: str) -> str:
    number = 0
    while hasattr(program.graph_module, f"{kind}_{number}"):
        number += 1
    return f"{kind}_{number}"
