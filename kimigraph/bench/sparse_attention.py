"""``kimigraph bench sfa``: absorbed attention of a decode step over 2048 listed fp8 rows; correctness first.

Its points over all rows of a cache are in ``kimigraph.bench.latent_attention``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.peers import LISTED_PEERS, PeerUnavailableError, adaptor
from kimigraph.bench.protocol import relative_error, sets_for_cold_cache, time_in_graph
from kimigraph.ir.descriptors import LatentDescriptor
from kimigraph.ir.errors import NumericsError

LATENT, ROPE, ROW, PAGE = 512, 64, 656, 64
PICKS = 2048
POINTS = (
    *((heads, batch, None) for heads in (64, 128) for batch in (1, 8, 64)),
    *((32, batch, 8192) for batch in (8, 64)),
)
"""Heads, batch, and the context where all of it is attended to."""
SCALE = (LATENT + ROPE) ** -0.5
FORM = str(LatentDescriptor("contiguous", "float8_e4m3fn", LATENT, ROPE, 0, 1, 128, "scales_rope", "power2"))
TOLERANCE = 4e-3
BYTES_AT_RATE = 4.3e6  # bytes a microsecond that a copy streams
FLOPS_AT_RATE = 7.9e8  # bf16 FLOPs a microsecond of a large product
FILL = 1 << 18  # rows filled at once


@dataclass(frozen=True)
class AttentionInputs:
    """One query and ``sets`` of lists over one pool of rows, no row in two lists; ids are rows of the pool."""

    q: torch.Tensor
    rows: torch.Tensor
    lists: torch.Tensor

    def operands(self, number: int) -> tuple[torch.Tensor | None, ...]:
        """One call's operands in schema order: every sequence reads the pool as its cache."""
        cache = self.rows.unsqueeze(0).expand(len(self.q), -1, -1)
        return self.q[..., :LATENT], self.q[..., LATENT:], cache, None, self.lists[number], None


def inputs(heads: int, batch: int) -> AttentionInputs:
    """Random rows, scales and queries; the lists ascend, as an indexer gives them."""
    count = sets_for_cold_cache(batch * PICKS * ROW)
    number = -(-max(count * batch * PICKS, 4096 * PAGE) // PAGE) * PAGE
    rows = torch.empty(number, ROW, dtype=torch.uint8, device="cuda")
    for start in range(0, number, FILL):
        some = rows[start : start + FILL]
        some.copy_(random_rows(len(some)))
    q = (torch.randn(batch, 1, heads, LATENT + ROPE, device="cuda") / 10).bfloat16()
    lists = torch.randperm(number, device="cuda")[: count * batch * PICKS].int().view(count, batch, 1, PICKS)
    return AttentionInputs(q, rows, lists.sort(dim=-1).values)


def random_rows(number: int) -> torch.Tensor:
    """Rows of 656 bytes: values, scales, rope part."""
    rows = torch.empty(number, ROW, dtype=torch.uint8, device="cuda")
    rows[:, :LATENT] = torch.randn(number, LATENT, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    rows[:, LATENT : LATENT + 16] = (torch.rand(number, 4, device="cuda") * 0.05 + 0.02).view(torch.uint8)
    rows[:, LATENT + 16 :] = torch.randn(number, ROPE, device="cuda").bfloat16().view(torch.uint8)
    return rows


def expected(given: AttentionInputs, number: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [heads, 512] and lse [heads] of one sequence in fp64, from the bytes."""
    rows = given.rows[given.lists[number, sequence, 0].long()]
    scales = rows[:, LATENT : LATENT + 16].contiguous().view(torch.float32).double().repeat_interleave(128, 1)
    latent = rows[:, :LATENT].view(torch.float8_e4m3fn).double() * scales
    keys = torch.cat([latent, rows[:, LATENT + 16 :].contiguous().view(torch.bfloat16).double()], 1)
    logits = given.q[sequence, 0].double() @ keys.T * SCALE
    return torch.softmax(logits, -1) @ latent, torch.logsumexp(logits, -1)


def point(heads: int, batch: int, context: int | None, peers: Sequence[str]) -> dict[str, Any]:
    """One shape: cold rows, one launch of ours a call."""
    if context is None:
        return listed_point(heads, batch, peers)
    from kimigraph.bench import latent_attention

    return latent_attention.point(heads, batch, context, peers)


def listed_point(heads: int, batch: int, peers: Sequence[str]) -> dict[str, Any]:
    """2048 rows of fp8 a sequence."""
    given = inputs(heads, batch)
    count = len(given.lists)
    names = ("q_latent", "q_rope", "latent", "rope", "indices", "block_table")
    tensors: dict[str, torch.Tensor | None] = dict(zip(names, given.operands(0), strict=True))
    kernel = kernel_for("sparse_attention", tensors, {"scale": SCALE, "descriptor": FORM})
    launch = kernel.launch
    errors: list[float] = []
    for number in (0, count - 1):
        out, lse = launch(*given.operands(number))
        wanted, wanted_lse = expected(given, number, batch - 1)
        errors += [relative_error(out[-1, 0], wanted), relative_error(lse[-1, 0], wanted_lse)]
    if not max(errors) <= TOLERANCE:
        raise NumericsError(f"attention H {heads} B {batch}: {max(errors):.2e} of the norm off the fp64 reference")
    time = time_in_graph([bound(launch, given.operands(number)) for number in range(count)])
    flops = 2 * batch * PICKS * heads * (2 * LATENT + ROPE)
    floor = max(batch * PICKS * ROW / BYTES_AT_RATE, flops / FLOPS_AT_RATE)
    found: dict[str, Any] = {"heads": heads, "batch": batch, "floor_us": round(floor, 2), "peers": {}}
    found["ours"] = {"us": time.as_dict(), "error": float(f"{max(errors):.3g}"), "route": kernel.CONSTANTS["route"]}
    found["peers"] = compare(
        [name for name in peers if name in LISTED_PEERS],
        lambda peer: peer.attention(given, SCALE),
        time.median,
        lambda result: relative_error(result[-1, 0], expected(given, 0, batch - 1)[0]),
    )
    return found


def compare(
    peers: Sequence[str], prepare: Callable[[Any], Any], ours: float, error: Callable[[torch.Tensor], float]
) -> dict[str, Any]:
    """Each peer's time, its ratio to ours and its first result's error, or why it has none."""
    found: dict[str, Any] = {}
    for name in peers:
        try:
            calls, result = prepare(adaptor(name))
            wrong, time = error(result), time_in_graph(calls)
            ratio = round(time.median / ours, 3)
            found[name] = {"us": time.as_dict(), "error": float(f"{wrong:.3g}"), "ratio": ratio}
        except PeerUnavailableError as reason:
            found[name] = {"unavailable": str(reason)}
    return found


def bound(launch: Callable[..., Any], operands: tuple[torch.Tensor | None, ...]) -> Callable[[], Any]:
    """The launch on these operands."""
    return lambda: launch(*operands)
