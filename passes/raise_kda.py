"""``raise-kda``: one step of Kimi Delta Attention, with convolution, gates and norm, becomes ``kda_decode``.

Anchored at the write of a recurrent state (``copy_`` into a rank-4 input); evidence: the delta rule as a commutative
pattern, one read-out, L2 norms, gate, and a short convolution that feeds q, k and v.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import Via
from kimigraph.passes.algebra.convolution import Convolution, convolution_at
from kimigraph.passes.algebra.delta_rule import LAYOUTS, delta_step, read_out, require_delta_layouts
from kimigraph.passes.algebra.frames import Operand, operand, require_type, row_major
from kimigraph.passes.algebra.gated_norm import Neighbours, neighbours_of, returned_as
from kimigraph.passes.algebra.match import Match
from kimigraph.passes.algebra.nodes import (
    COPIES,
    FLOATS,
    SPLITS,
    dtype,
    is_cast,
    is_split_item,
    is_view,
    packet,
    rank,
    shape,
)
from kimigraph.passes.algebra.prefill_gate import PrefillGate, is_gateless, is_per_head, prefill_gate, take_raw
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import build, call, replace
from kimigraph.passes.algebra.rule import FusionPass, require_unwritten

ATEN = torch.ops.aten


@dataclass(frozen=True)
class KdaSite:
    """A checked step: the state's write, what it matched, the convolution, what follows, and the node to replace."""

    write: Node
    match: Match
    layout: str
    convolution: Convolution
    neighbours: Neighbours
    out: Node
    operands: dict[str, Operand]
    key_dim: int
    one_decay: bool
    """The gate has one logit a head (GDN) instead of one a key channel."""


@dataclass(frozen=True)
class RaiseKda(FusionPass):
    """Names the decode step of Kimi Delta Attention, for states [B, H, K, V] and [B, H, V, K].

    Refused: another recurrence, q, k and v in other channels of the convolution, a state or cached input used
    elsewhere, more than one token a step, a read-out used in another type than the operator returns.
    """

    name: ClassVar[str] = "raise-kda"
    summary: ClassVar[str] = "convolution, gates, delta rule, read-out and gated norm become one kda_decode"
    fusion: ClassVar[bool] = True
    pattern: ClassVar[str] = (
        "a write of a whole rank-4 state whose value is the delta rule (decay, update by key and beta, read-out), with "
        "the short convolution, SiLU, L2 norms, gate and gated norm around it"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "one new token a step",
        "q, k and v are channels of one depthwise convolution without bias",
        "both states are read in this step only, and replaced once",
        "as many heads of q and k as of v; the decay one a key channel, or one a head (GDN)",
        "state [B, H, K, V] or [B, H, V, K]",
        "bfloat16, float16 or float32",
    )
    effect: ClassVar[str] = "`kda_decode`, which updates both states in place"

    def anchors(self, graph: Graph) -> Sequence[Node]:
        """The writes of whole rank-4 inputs, and marked prefills whose gate is computed before."""
        return [node for node in graph.nodes if _is_state_write(node) or is_gateless(node)]

    def via(self, site: KdaSite | PrefillGate) -> Via:
        """A prefill is known by its mark."""
        return "mark" if isinstance(site, PrefillGate) else "pattern"

    def check(self, program: CapturedProgram, anchor: Node) -> KdaSite | PrefillGate:
        """The KDA step that ends in this write, or the gate in front of this prefill."""
        if is_gateless(anchor):
            return prefill_gate(program.graph_module.graph, anchor)
        match, layout = _step(anchor)
        try:
            return _checked(program.graph_module.graph, anchor, match, layout)
        except Refused as refusal:
            raise refusal.raised_to(len(match.path), match.path) from refusal

    def rewrite(self, program: CapturedProgram, site: KdaSite | PrefillGate) -> Node:
        """Put the operator before the last node taken along, erase the old writes."""
        graph = program.graph_module.graph
        if isinstance(site, PrefillGate):
            return take_raw(graph, site)
        place, conv, after = site.out, site.convolution, site.neighbours
        built = {name: build(graph, found, place) for name, found in site.operands.items()}
        if site.one_decay:
            built |= {name: _per_channel(graph, built[name], site.key_dim, place) for name in ("gate", "dt_bias")}
        numbers = site.match.numbers
        node = call(
            graph,
            OPERATORS["kda_decode"].overload,
            (
                build(graph, conv.x, place),
                build(graph, conv.weight, place),
                conv.state,
                *(built[name] for name in ("gate", "dt_bias", "a_log", "beta")),
                site.write.args[0],
                None if after.out_gate is None else build(graph, after.out_gate, place),
                None if after.norm_weight is None else build(graph, after.norm_weight, place),
            ),
            {
                "scale": numbers["scale"],
                "l2_eps": numbers["l2_eps"],
                "lower_bound": numbers.get("lower_bound"),
                "norm_eps": 1e-5 if after.norm_eps is None else after.norm_eps,
                "state_layout": site.layout,
            },
            like=site.match.base("new"),
            before=place,
            replaces=[step for step in (*conv.path, site.match.base("new"), site.write, *after.path) if _named(step)],
        )
        _hand_over(graph, site, node)
        return node


def _is_state_write(node: Node) -> bool:
    if node.target is not ATEN.copy_.default:
        return False
    state = node.args[0]
    return isinstance(state, Node) and state.op == "placeholder" and rank(state) == 4


def _named(node: Node) -> bool:
    return packet(node) in ("conv1d", "silu", "copy_", "rsqrt") or (packet(node) == "add" and rank(node) == 4)


def _step(write: Node) -> tuple[Match, str]:
    """The match and the state layout under which it holds; the better refusal when none does."""
    best: Refused | None = None
    for layout in LAYOUTS:
        try:
            return _laid_out(write, layout), layout
        except Refused as refusal:
            best = refusal if best is None or refusal.score > best.score else best
    assert best is not None
    raise best


def _laid_out(write: Node, layout: str) -> Match:
    value = write.args[1]
    assert isinstance(value, Node)
    match = delta_step(value, layout)
    if match.base("state") is not write.args[0]:
        raise Refused(
            "the decayed tensor is not the state that is written", match.base("state"), len(match.path), match.path
        )
    strides = row_major("bh" + layout, dict(zip("bh" + layout, shape(value), strict=True)))
    for leaf in match.leaves["decayed"]:
        found = leaf.strides()
        if found is None or any(found[0].get(axis, 0) != stride for axis, stride in strides.items()):
            raise Refused(
                f"the state is not [B, H, {', '.join(layout.upper())}]", write, len(match.path) - 1, match.path
            )
    return match


def _checked(graph: Graph, write: Node, match: Match, layout: str) -> KdaSite:
    state = write.args[0]
    assert isinstance(state, Node)
    sizes = dict(zip("bh" + layout, shape(state), strict=True)) | {"s": 1}
    core, match = read_out(match)
    _require_ungrouped(match, sizes)
    require_delta_layouts(match, layout, sizes)
    if not match.base("q") is match.base("k") is match.base("v"):
        raise Refused("q, k and v do not come from one convolution", match.base("q"))
    convolution = convolution_at(match.base("v"))
    shell = _shell(core)
    neighbours = neighbours_of(shell[-1], sizes)
    out = returned_as(neighbours.out if neighbours.path else shell[-1], dtype(convolution.x.node))
    path = [*match.path, *convolution.path, *shell, *neighbours.path, write, out]
    _require_inside(state, convolution.state, path, out)
    one_decay = is_per_head(match.leaf("gate"), sizes)
    channels = {"h": sizes["h"]} if one_decay else {"h": sizes["h"], "k": sizes["k"]}
    axes, width = "".join(channels), prod(channels.values())
    operands = {
        "gate": operand("the gate", match.leaf("gate"), "b" + axes, sizes, (sizes["b"], 1, width)),
        "dt_bias": operand("the gate's bias", match.leaf("dt_bias"), axes, sizes, (width,)),
        "a_log": operand("A_log", match.leaf("a_log"), "h", sizes),
        "beta": operand("beta", match.leaf("beta"), "bh", sizes, (sizes["b"], 1, sizes["h"])),
    }
    for name, found in {**operands, "qkv": convolution.x}.items():
        require_type(name, found.node, FLOATS)
        require_unwritten(graph, name, found, out)
    further = {
        "the convolution's weight": convolution.weight,
        "the output gate": neighbours.out_gate,
        "the norm's weight": neighbours.norm_weight,
    }
    for name, found in further.items():
        if found is not None:
            require_unwritten(graph, name, found, out)
    return KdaSite(write, match, layout, convolution, neighbours, out, operands, sizes["k"], one_decay)


def _require_ungrouped(match: Match, sizes: Mapping[str, int]) -> None:
    """Refuse q and k of fewer heads than v: then the convolution has fewer channels than the operator's."""
    base = match.base("q")
    channels = prod(shape(match.base("v"))) // sizes["b"]
    if packet(base) == "repeat_interleave" or channels < sizes["h"] * (2 * sizes["k"] + sizes["v"]):
        raise Refused("q and k have fewer heads than v (grouped, as in GDN): kda_decode takes one each", base)


def _per_channel(graph: Graph, node: Node, width: int, before: Node) -> Node:
    """A tensor [.., H] as [.., H, width] that repeats each element; nothing is copied."""
    one = call(graph, ATEN.unsqueeze.default, (node, -1), like=node, before=before)
    return call(graph, ATEN.expand.default, (one, [*shape(node), width]), like=node, before=before)


def _shell(core: Node) -> list[Node]:
    """The read-out and what only puts it into a row of one token: a write into zeros, views."""
    shell = [core]
    while len(shell[-1].users) == 1:
        user = next(iter(shell[-1].users))
        if packet(user) == "copy" and user.args[1] is shell[-1] and shape(user) == shape(shell[-1]):
            shell.append(user)
        elif packet(user) == "select_scatter" and user.args[1] is shell[-1] and _only_row(user):
            shell.append(user)
        else:
            break
    return shell


def _only_row(scatter: Node) -> bool:
    dim = scatter.args[2]
    return isinstance(dim, int) and shape(scatter)[dim] == 1 and scatter.args[3] in (0, -1)


def _require_inside(state: Node, conv_state: Node, path: Sequence[Node], out: Node) -> None:
    """Refuse when anything but the match reads what depends on the two states; a view alone reads nothing."""
    inside = set(path)
    for root in (state, conv_state):
        reached = [root]
        for node in reached:
            for user in node.users:
                if user not in inside and not _is_transparent(user):
                    raise Refused(f"{root.name} is used elsewhere, by {user.name}", user)
                if user not in reached and user is not out:
                    reached.append(user)


def _is_transparent(node: Node) -> bool:
    return is_view(node) or is_cast(node) or node.target in COPIES or node.target in SPLITS or is_split_item(node)


def _hand_over(graph: Graph, site: KdaSite, node: Node) -> None:
    """Give the operator's result to the users of the old one; the old writes go, their results are the states."""
    for write in (site.write, site.convolution.write):
        source = write.args[0]
        assert isinstance(source, Node)
        write.replace_all_uses_with(source, propagate_meta=False)
        graph.erase_node(write)
    result = node
    if shape(site.out) != shape(node):
        result = call(graph, ATEN.view.default, (node, list(shape(site.out))), like=node, before=site.out)
    replace(site.out, result)
