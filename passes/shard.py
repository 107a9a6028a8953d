"""``shard``: heads, widths and vocabulary of a program are shared out among ranks, and collectives put in.

Weights and states are placed by their role (``passes.sharding.plan``), and what follows from that is carried through
the graph operator by operator; where a whole value is needed, partial sums are added up and shares gathered by
functional collectives of torch.distributed. The program is one for all ranks: a rank differs by what it binds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

import torch
from torch.fx import Node

from kimigraph.ir.descriptors import ConvDescriptor, StateDescriptor, parse_descriptor
from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import fake_mode
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.purity import dead_code
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.ir.shares import Share
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.sharding.joined import join_sums
from kimigraph.passes.sharding.plan import share_of
from kimigraph.passes.sharding.spread import Spread

ATEN = torch.ops.aten
_PRODUCTS = (ATEN.linear.default, ATEN.mm.default, ATEN.addmm.default)


@dataclass(frozen=True)
class Shard(Pass):
    """Shares a program out among the ``tp`` ranks of the compilation; with one it does nothing.

    UsageError for a role whose size the ranks do not divide, CompileError for a state that cannot be written in shares.
    """

    name: ClassVar[str] = "shard"
    summary: ClassVar[str] = "heads, widths and vocabulary are shared out among tp ranks, with collectives between"
    changes_formats: ClassVar[bool] = True
    pattern: ClassVar[str] = "weights and states by their role: heads, rows, columns, experts, vocabulary"
    constraints: ClassVar[tuple[str, ...]] = (
        "`--tp` is more than 1",
        "the ranks divide heads, widths of MLPs and experts, vocabulary and hidden size",
        "a table of embeddings that is also the head is replicated",
    )
    effect: ClassVar[str] = (
        "inputs of a rank's shapes; `_c10d_functional.all_reduce` of partial sums, `all_gather_into_tensor` of shares"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Share out all inputs that have a role, then everything that follows from them."""
        ways = context.config.tp
        if ways == 1:
            return PassResult(False)
        graph = program.graph_module.graph
        whole = {node: node.meta.get("val") for node in graph.nodes}
        placed = _share_inputs(program, ways)
        walk = Spread(graph, ways, dict(placed), whole)
        walk.run()
        joined = join_sums(graph)
        dead_code(graph)
        graph.lint()
        program.graph_module.recompile()
        program.info["mesh"] = {"tp": ways}
        return _result(self.name, program, placed, walk, joined)


def _share_inputs(program: CapturedProgram, ways: int) -> dict[Node, Share]:
    """Give the inputs that have a role a rank's shapes."""
    found: dict[Node, Share] = {}
    specs: list[InputSpec] = []
    mode = fake_mode(program.graph_module.graph)
    for spec, node in zip(program.inputs, program.placeholders.values(), strict=True):
        share = None if _is_tied(node) else share_of(spec.source, spec.shape, ways)
        if share is None:
            specs.append(spec)
            continue
        value, local = node.meta["val"], share.local(spec.shape)
        if not value.is_contiguous():
            raise CompileError(f"shard: {spec.source} is not contiguous and cannot be shared out: use tp 1")
        with mode:
            node.meta["val"] = torch.empty(local, dtype=value.dtype, device=value.device)
        stride = tuple(node.meta["val"].stride())
        descriptor = _descriptor(spec.descriptor, ways)
        specs.append(replace(spec, shape=local, stride=stride, descriptor=descriptor, share=tuple(share)))
        program.tensors.pop(spec.name, None)
        found[node] = share
    program.inputs = tuple(specs)
    return found


def _is_tied(node: Node) -> bool:
    """Whether a table of embeddings is the matrix of a product, too: one needs its columns, the other its rows."""
    targets = {user.target for user in node.users}
    return ATEN.embedding.default in targets and not targets.isdisjoint(_PRODUCTS)


def _descriptor(text: str, ways: int) -> str:
    form = parse_descriptor(text) if text else None
    if isinstance(form, StateDescriptor):
        return str(replace(form, heads=form.heads // ways))
    if isinstance(form, ConvDescriptor):
        return str(replace(form, channels=form.channels // ways))
    return text


def crossing(nodes: Iterable[Node], ways: int) -> int:
    """Bytes that a rank sends in the collectives among ``nodes``: a sum goes round in two rings, a gather in one."""
    sent = 0
    for node in nodes:
        if "all_reduce" in str(node.target):
            sent += 2 * (ways - 1) * node.meta["val"].nbytes // ways
        elif "all_gather" in str(node.target):
            sent += (ways - 1) * node.meta["val"].nbytes // ways
    return sent


def _result(name: str, program: CapturedProgram, placed: dict[Node, Share], walk: Spread, joined: int) -> PassResult:
    nodes = [node for node in program.graph_module.graph.nodes if "_c10d_functional" in str(node.target)]
    reduced = [node for node in nodes if "all_reduce" in str(node.target)]
    gathered = [node for node in nodes if "all_gather" in str(node.target)]
    bytes_of = {
        spec.source: prod(spec.shape) * getattr(torch, spec.dtype).itemsize
        for spec in program.inputs
        if spec.kind == "weight"
    }
    shared = {spec.source for spec in program.inputs if spec.share}
    own, copies = (
        sum(size for source, size in bytes_of.items() if (source in shared) is held) for held in (True, False)
    )
    told = (
        f"{len(placed)} inputs in {walk.ways} shares: a rank has {own:,} bytes of weights, 1/{walk.ways} of theirs, "
        f"and {copies:,} bytes of replicated ones; {len(reduced)} all-reduces ({joined} of two sums) and "
        f"{len(gathered)} all-gathers a step send {crossing(nodes, walk.ways):,} bytes a rank"
    )
    remarks = [Remark("passed", name, told, reduced[0].name if reduced else "", nodes=tuple(n.name for n in nodes))]
    remarks += [
        Remark(
            "missed",
            name,
            f"{node.name} works on whole values: {reason}",
            node.name,
            source_line(node) or "",
            module=module_path(node),
        )
        for node, reason in walk.notes
    ]
    counts = {"shared": len(placed), "all_reduces": len(reduced), "all_gathers": len(gathered)}
    counts |= {"joined_sums": joined, "bytes_sent": crossing(nodes, walk.ways)}
    return PassResult(True, tuple(remarks), {**counts, "gathered_for_unknown": len(walk.notes)})
