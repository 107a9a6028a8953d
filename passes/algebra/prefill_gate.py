"""Gate and strength in front of a marked ``kda_prefill``: taken inside, the operator reads raw logits."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.schemas import bind
from kimigraph.passes.algebra.delta_rule import log_decay
from kimigraph.passes.algebra.frames import Frame, Occurrence, Operand, operand, require_type
from kimigraph.passes.algebra.match import Match
from kimigraph.passes.algebra.nodes import FLOATS, packet, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import build, call, replace
from kimigraph.passes.algebra.rule import require_unwritten
from kimigraph.passes.algebra.unify import Leaf, Op, Pattern, find

OPERATOR = "kda_prefill"
_AXES = "bshk"
_STRENGTH = Op("sigmoid", Leaf("beta"))


@dataclass(frozen=True)
class PrefillGate:
    """A checked gate: the call, the raw operands by the schema's names, the bound of the decay, what vanishes."""

    node: Node
    operands: dict[str, Operand]
    lower_bound: float | None
    path: tuple[Node, ...]


def is_gateless(node: Node) -> bool:
    """Whether a node calls ``kda_prefill`` with gate and strength that are computed before."""
    return node.target is OPERATORS[OPERATOR].overload and bind(node)["a_log"] is None


def prefill_gate(graph: Graph, node: Node) -> PrefillGate:
    """The gate and the strength of a call. Refused when they are no gate of Kimi Delta Attention."""
    given = bind(node)
    gate = _matched(log_decay("bs"), given["g"], Frame.of(_AXES))
    strength = _matched(_STRENGTH, given["beta"], Frame.of("bsh"))
    path = (*gate.path, *strength.path)
    sizes = dict(zip(_AXES, shape(given["q"]), strict=True))
    try:
        if is_per_head(gate.leaf("gate"), sizes):
            raise Refused("the decay is one a head (GDN), so its gate stays in front of kda_prefill", gate.base("gate"))
        operands = _operands(gate, strength, sizes)
        for name, found in operands.items():
            require_type(f"the {name}", found.node, FLOATS)
            require_unwritten(graph, f"the {name}", found, node)
    except Refused as refusal:
        raise refusal.raised_to(len(path), path) from refusal
    return PrefillGate(node, operands, gate.numbers.get("lower_bound"), path)


def is_per_head(gate: Occurrence, sizes: Mapping[str, int]) -> bool:
    """Whether a gate has one logit for all key channels of a head, as in GDN."""
    found = gate.strides()
    return sizes["k"] > 1 and found is not None and not found[0].get("k", 0)


def _matched(pattern: Pattern, value: Node, frame: Frame) -> Match:
    match, trace = find(pattern, value, frame)
    if match is None:
        miss = trace.deepest()
        assert miss is not None
        raise Refused(f"the raw gate or strength: {miss.reason}", miss.node, max(miss.depth, 1), miss.matched)
    return match


def _operands(gate: Match, strength: Match, sizes: Mapping[str, int]) -> dict[str, Operand]:
    whole = tuple(sizes[axis] for axis in _AXES)
    return {
        "g": operand("the gate", gate.leaf("gate"), _AXES, sizes, whole),
        "beta": operand("the strength", strength.leaf("beta"), "bsh", sizes, whole[:3]),
        "a_log": operand("a_log", gate.leaf("a_log"), "h", sizes),
        "dt_bias": operand("dt_bias", gate.leaf("dt_bias"), "hk", sizes, (sizes["h"] * sizes["k"],)),
    }


def take_raw(graph: Graph, site: PrefillGate) -> Node:
    """The call on the raw operands, in place of the old one."""
    given = bind(site.node)
    given |= {name: build(graph, found, site.node) for name, found in site.operands.items()}
    names = ("q", "k", "v", "g", "beta", "initial_state", "a_log", "dt_bias", "cu_seqlens")
    node = call(
        graph,
        OPERATORS[OPERATOR].overload,
        tuple(given[name] for name in names),
        {**site.node.kwargs, "lower_bound": site.lower_bound},
        like=site.node,
        before=site.node,
        replaces=[*(step for step in site.path if packet(step) in ("sigmoid", "softplus", "exp")), site.node],
    )
    replace(site.node, node)
    graph.erase_node(site.node)
    return node
