# pyright: basic
# Reason: the operator is only known to torch after its library is loaded.
"""FlashMLA's sparse decode over fp8 rows of 656 bytes, as vLLM ships it."""

from typing import Any

import torch

from kimigraph.bench.peers import PeerUnavailableError, Prepared
from kimigraph.bench.peers.libraries import load

TITLE = "FlashMLA"
HEADS = (64, 128)


def attention(given: Any, scale: float) -> tuple[list[Prepared], torch.Tensor]:
    """A call for each input set, metadata made once; and the first set's output [B, 1, H, 512]."""
    load("_flashmla_C")
    load("_flashmla_extension_C")
    heads = given.q.shape[2]
    if heads not in HEADS:
        raise PeerUnavailableError(f"{TITLE} is built for {' and '.join(map(str, HEADS))} heads, not {heads}")
    rows = given.rows.view(-1, 64, 1, 656).view(torch.float8_e4m3fn)

    def decode(number: int, schedule: Any, splits: Any, out: torch.Tensor | None) -> Any:
        return torch.ops._flashmla_C.sparse_decode_fwd(
            given.q, rows, given.lists[number], None, None, schedule, splits, None, None, None, 512, scale, out, False
        )

    result, _, schedule, splits = decode(0, None, None, None)
    out = torch.empty_like(result)
    calls = [lambda number=number: decode(number, schedule, splits, out) for number in range(len(given.lists))]
    return calls, result.view(len(given.q), 1, heads, 512)
