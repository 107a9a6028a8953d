"""RMS norms of latents that only their cache write reads: the writer takes them along."""

from dataclasses import dataclass

from torch.fx import Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.schemas import bind
from kimigraph.passes.algebra.nodes import argument, shape
from kimigraph.passes.algebra.strips import through


@dataclass(frozen=True)
class PrivateNorm:
    """An ``rms_norm`` below what a ``latent_write`` writes, which nothing else reads; ``values`` are what it norms."""

    values: Node
    weight: Node
    eps: float


def private_norm(write: Node) -> PrivateNorm | None:
    """The norm that the write can do itself: of whole rows, with a weight, rounded once."""
    below = through(argument(write, "values"))
    norm = below.node
    if norm.target is not OPERATORS["rms_norm"].overload:
        return None
    given = bind(norm)
    weight, alone = given["weight"], all(len(node.users) == 1 for node in (norm, *below.path))
    if not alone or weight is None or given["residual"] is not None or given["rounds_first"]:
        return None
    fits = shape(given["x"]) == shape(argument(write, "values"))
    return PrivateNorm(given["x"], weight, given["eps"]) if fits else None
