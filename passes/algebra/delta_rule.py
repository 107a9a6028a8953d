"""The decode step of Kimi Delta Attention as patterns, read under the axes of its state: b, h, k, v."""

from torch.fx import Node

from kimigraph.passes.algebra.frames import Frame, require_layout, row_major
from kimigraph.passes.algebra.match import Match
from kimigraph.passes.algebra.nodes import packet, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.unify import Bind, Either, Leaf, Literal, Number, Op, Pattern, Scaled, Sum, find

LAYOUTS = ("kv", "vk")


def squared(x: Pattern) -> Pattern:
    """The square of a tensor."""
    return Either(Op("mul", x, x), Op("square", x), Op("pow", x, Literal(2)))


def l2_normalised(x: Pattern, axis: str, eps: str) -> Pattern:
    """x / sqrt(sum(x^2) + eps)."""
    total = Op("add", Sum(squared(x), axis), Number(eps))
    return Either(Op("mul", x, Op("rsqrt", total)), Op("div", x, Op("sqrt", total)))


def softplus(x: Pattern) -> Pattern:
    """log(1 + exp(x)), also in its spelling with a threshold."""
    spelled = Op(
        "where",
        Op("gt", x, Literal(20)),
        x,
        Either(Op("log", Op("add", Op("exp", x), Literal(1))), Op("log1p", Op("exp", x))),
    )
    return Either(Op("softplus", x), spelled)


def log_decay(tokens: str) -> Pattern:
    """The gate of raw logits, bounded or not; ``tokens``: the axes along which bias and rate are the same."""
    logit = Bind("logit", Op("add", Leaf("gate"), Leaf("dt_bias", constant_along=tokens)))
    rate = Op("exp", Leaf("a_log", constant_along=tokens + "k"))
    unbounded = Either(Op("mul", Op("neg", rate), softplus(logit)), Op("neg", Op("mul", rate, softplus(logit))))
    bounded = Op("mul", Op("sigmoid", Op("mul", rate, logit)), Number("lower_bound"))
    return Either(bounded, unbounded)


_DECAYED = Bind("decayed", Op("mul", Leaf("state"), Op("exp", log_decay("b"))))
_KEY = l2_normalised(Leaf("k"), "k", "l2_eps")
_BETA = Op("sigmoid", Leaf("beta"))


def _update(key: Pattern) -> Pattern:
    seen = Sum(Op("mul", _DECAYED, key), "k")
    error = Op("sub", Leaf("v"), seen)
    return Either(Op("mul", key, Op("mul", error, _BETA)), Op("mul", Op("mul", key, _BETA), error))


NEW_STATE = Bind("new", Op("add", _DECAYED, _update(Bind("key", _KEY))))
READ_OUT = Sum(Op("mul", Bind("new", Leaf("new")), Scaled("scale", l2_normalised(Leaf("q"), "k", "l2_eps"))), "k")


def delta_step(value: Node, layout: str) -> Match:
    """The state update whose result is ``value`` [B, H, ., .], in one state layout. Refused when it is none."""
    frame = Frame.of("bh" + layout)
    match, trace = find(NEW_STATE, value, frame)
    if match is None:
        miss = trace.deepest()
        if miss is None:
            raise Refused("the new state is no sum of a decayed state and an update", value)
        raise Refused(f"the new state: {miss.reason}", miss.node, miss.depth, miss.matched)
    return match


def read_out(match: Match) -> tuple[Node, Match]:
    """The one read-out of the new state: its node [B, H, V] and the match extended by it."""
    new = match.base("new")
    best: Refused | None = None
    for node in sorted(_near(new)):
        if packet(node) in ("sum", "matmul", "bmm") and node not in match.path:
            extended, trace = find(READ_OUT, node, _read_out_frame(node), match)
            if extended is not None:
                return node, extended
            miss = trace.deepest()
            if miss is not None and (best is None or miss.depth > best.score):
                best = Refused(f"the read-out: {miss.reason}", miss.node, miss.depth, miss.matched)
    raise best or Refused("the new state is not read out", new, len(match.path), match.path)


def _near(new: Node, depth: int = 6) -> set[Node]:
    """What uses ``new``, at most a few steps away."""
    found, edge = set[Node](), {new}
    for _ in range(depth):
        edge = {user for node in edge for user in node.users} - found
        found |= edge
    return found


def _read_out_frame(node: Node) -> Frame:
    """[B, H, V], or what a matrix product leaves: [B, H, V, 1] or [B, H, 1, V]."""
    sizes = shape(node)
    if len(sizes) < 4:
        return Frame.of("bhv")
    column = -1 if sizes[-1] == 1 else -2
    return Frame(("b", "h", "v"), lambda tensor: tensor.squeeze(column))


def require_delta_layouts(match: Match, layout: str, sizes: dict[str, int]) -> None:
    """Refuse unless every operand varies along the axes as the delta rule says: q, k, v by channel, gates by head."""
    heads, key, value = sizes["h"], sizes["k"], sizes["v"]
    channels = heads * (2 * key + value)
    state = row_major("bh" + layout, sizes)
    per_key = {"b": channels, "h": key, "k": 1}
    per_value = {"b": channels, "h": value, "v": 1}
    wanted = {"q": (per_key, 0), "k": (per_key, heads * key), "v": (per_value, 2 * heads * key)}
    for name, (strides, offset) in wanted.items():
        for leaf in match.leaves[name]:
            present = {axis: stride if sizes[axis] > 1 else 0 for axis, stride in strides.items()}
            require_layout(name, leaf, present, offset)
    for name in ("state", "decayed", "new"):
        for leaf in match.leaves[name]:
            require_layout("the state", leaf, state)
