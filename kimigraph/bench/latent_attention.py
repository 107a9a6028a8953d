"""The points of ``kimigraph bench sfa`` over all rows of a bf16 cache, latent and rope part in one row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kimigraph.bench import sparse_attention as listed
from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.peers import DENSE_PEERS
from kimigraph.bench.protocol import relative_error, sets_for_cold_cache, time_in_graph
from kimigraph.ir.descriptors import LatentDescriptor
from kimigraph.ir.errors import NumericsError

WIDTH = listed.LATENT + listed.ROPE
FORM = str(LatentDescriptor("contiguous", "bfloat16", listed.LATENT, listed.ROPE, 0, 1))


@dataclass(frozen=True)
class DenseInputs:
    """``q`` [B, 1, H, 576] and a cache [B, T, 576] for each input set, all of it visible."""

    latent_width: ClassVar[int] = listed.LATENT
    q: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    lengths: torch.Tensor

    def operands(self, number: int) -> tuple[torch.Tensor | None, ...]:
        """One call's operands in schema order."""
        return self.q[..., : listed.LATENT], self.q[..., listed.LATENT :], self.rows[number], None, self.lengths, None


def inputs(heads: int, batch: int, context: int) -> DenseInputs:
    """Random rows and queries."""
    count = sets_for_cold_cache(batch * context * WIDTH * 2)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, 1, heads, WIDTH, **options) / 10
    rows = tuple(torch.randn(batch, context, WIDTH, **options) for _ in range(count))
    return DenseInputs(q, rows, torch.full((batch,), context, dtype=torch.int32, device="cuda"))


def expected(given: DenseInputs, number: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [heads, 512] and lse [heads] of one sequence in fp64."""
    rows = given.rows[number][sequence].double()
    logits = given.q[sequence, 0].double() @ rows.T * listed.SCALE
    return torch.softmax(logits, -1) @ rows[:, : listed.LATENT], torch.logsumexp(logits, -1)


def point(heads: int, batch: int, context: int, peers: Sequence[str]) -> dict[str, Any]:
    """One shape: cold rows, one launch of ours a call."""
    given = inputs(heads, batch, context)
    names = ("q_latent", "q_rope", "latent", "rope", "lengths", "block_table")
    tensors: dict[str, torch.Tensor | None] = dict(zip(names, given.operands(0), strict=True))
    kernel = kernel_for("latent_attention", tensors, {"scale": listed.SCALE, "descriptor": FORM})
    errors: list[float] = []
    for number in (0, len(given.rows) - 1):
        out, lse = kernel.launch(*given.operands(number))
        wanted, wanted_lse = expected(given, number, batch - 1)
        errors += [relative_error(out[-1, 0], wanted), relative_error(lse[-1, 0], wanted_lse)]
    if not max(errors) <= listed.TOLERANCE:
        raise NumericsError(
            f"dense attention H {heads} B {batch}: {max(errors):.2e} of the norm off the fp64 reference"
        )
    time = time_in_graph([listed.bound(kernel.launch, given.operands(n)) for n in range(len(given.rows))])
    flops = 2 * batch * context * heads * (2 * listed.LATENT + listed.ROPE)
    floor = max(batch * context * WIDTH * 2 / listed.BYTES_AT_RATE, flops / listed.FLOPS_AT_RATE)
    ours = {"us": time.as_dict(), "error": float(f"{max(errors):.3g}"), "route": kernel.CONSTANTS["route"]}
    others = listed.compare(
        [name for name in peers if name in DENSE_PEERS],
        lambda peer: peer.latent_attention(given, listed.SCALE),
        time.median,
        lambda result: relative_error(result[-1], expected(given, 0, batch - 1)[0]),
    )
    shape = {"heads": heads, "batch": batch, "context": context}
    return {**shape, "floor_us": round(floor, 2), "peers": others, "ours": ours}
