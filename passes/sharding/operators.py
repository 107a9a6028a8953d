"""How semantic operators carry shares on: which dim of each operand their heads or widths are, and of each result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from torch._ops import OpOverload
from torch.fx import Node

from kimigraph.ir.shares import Share
from kimigraph.passes.algebra.nodes import argument
from kimigraph.passes.sharding.placement import PARTIAL, REPLICATED, NotCarried, Placement, Placements, Walk, Whole

Dims = tuple[int, int]
"""A dim and its blocks."""
HEADS_BEHIND_TOKENS: Dims = (2, 1)
CHANNELS: Dims = (2, 3)


@dataclass(frozen=True)
class Form:
    """The dims that ranks share when an operator works on some of its heads. Other operands are whole.

    A result is a dim, or its placement.
    """

    operands: Mapping[str, Dims]
    results: tuple[Dims | Placement, ...]
    single: bool = False

    def __call__(self, walk: Walk, node: Node) -> Placements:
        """The rule."""
        for declared in cast(OpOverload, node.target)._schema.arguments:
            operand = argument(node, declared.name)
            if isinstance(operand, Node):
                self._require(walk, declared.name, operand)
        placed = tuple(_placement(item, walk.ways) for item in self.results)
        return placed[0] if self.single else placed

    def _require(self, walk: Walk, name: str, operand: Node) -> None:
        given, shape = walk.share(operand), walk.shape(operand)
        wanted = self.operands.get(name)
        if wanted is None:
            if given is not None:
                raise NotCarried(f"its operand {name} is shared out")
            return
        dim, blocks = wanted
        if max(shape) == shape[given.dim if given else 0] and shape.count(1) == len(shape) - 1:
            dim = given.dim if given else dim  # numbers of heads with dims of size 1 around them
        if given is None or (given.dim, given.blocks) != (dim, blocks):
            raise NotCarried(f"its operand {name} is not shared out by heads")


def _placement(item: Dims | Placement, ways: int) -> Placement:
    return item if isinstance(item, Share | Whole) else Share(*item, ways)


_STEP: dict[str, Dims] = {
    "qkv": CHANNELS,
    "conv_weight": (0, 3),
    "conv_state": (1, 3),
    "gate": HEADS_BEHIND_TOKENS,
    "dt_bias": (0, 1),
    "a_log": (0, 1),
    "beta": HEADS_BEHIND_TOKENS,
    "state": (1, 1),
    "out_gate": HEADS_BEHIND_TOKENS,
}
_RECORDS: dict[str, Dims] = {
    **dict.fromkeys(("keys", "decays", "deltas"), HEADS_BEHIND_TOKENS),
    "inputs": CHANNELS,
}
_CHUNKS: dict[str, Dims] = {
    **dict.fromkeys(("q", "k", "v", "g", "beta"), HEADS_BEHIND_TOKENS),
    "initial_state": (1, 1),
    "a_log": (0, 1),
    "dt_bias": (0, 1),
}
_ATTENTION: dict[str, Dims] = {"q_latent": HEADS_BEHIND_TOKENS, "q_rope": HEADS_BEHIND_TOKENS, "sink": (0, 1)}


def _norm(walk: Walk, node: Node) -> Placement:
    """Rows that are normalised stay whole."""
    x = argument(node, "x")
    share = walk.share(x)
    residual = argument(node, "residual")
    if share is None or share.dim == len(walk.shape(node)) - 1 or walk.share(argument(node, "weight")):
        raise NotCarried("it normalises the dim that ranks share")
    if residual is not None and walk.share(residual) != share:
        raise NotCarried("rows and residual are shared out differently")
    return share


def _experts(walk: Walk, node: Node) -> Placements:
    """Some columns of each expert: what they add up to. What is behind the sum has to wait for the other ranks."""
    absorbed = [name for name in ("up", "norm_weight", "shared_down", "residual") if argument(node, name) is not None]
    if absorbed:
        raise NotCarried(
            f"it holds {', '.join(absorbed)} behind the sum over ranks: let raise-moe leave that apart "
            "(raise-moe{tail-tokens=0})"
        )
    return Form({"gate_up": (1, 2), "down": (2, 1)}, (PARTIAL, REPLICATED))(walk, node)


OPERATOR_RULES: dict[str, Callable[[Walk, Node], Placements]] = {
    "kda_decode": Form(_STEP, (HEADS_BEHIND_TOKENS,), single=True),
    "kda_verify": Form({**_STEP, **_RECORDS}, (HEADS_BEHIND_TOKENS,), single=True),
    "kda_prefill": Form(_CHUNKS, (HEADS_BEHIND_TOKENS, (1, 1))),
    "kda_prefill_deltas": Form(_CHUNKS, (HEADS_BEHIND_TOKENS, (1, 1), HEADS_BEHIND_TOKENS)),
    "short_conv": Form({"x": CHANNELS, "weight": (0, 3), "initial_state": (1, 3)}, (CHANNELS, (1, 3))),
    "sparse_attention": Form(_ATTENTION, (HEADS_BEHIND_TOKENS, HEADS_BEHIND_TOKENS)),
    "latent_attention": Form(_ATTENTION, (HEADS_BEHIND_TOKENS, HEADS_BEHIND_TOKENS)),
    "rms_norm": _norm,
    "moe_experts": _experts,
}
"""By the operator's name. Others work on whole values."""
