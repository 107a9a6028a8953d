"""Two products around a softmax over a latent cache, by torch.compile."""

from typing import Any

import torch

from kimigraph.bench.peers import Prepared


def latent_attention(given: Any, scale: float) -> tuple[list[Prepared], torch.Tensor]:
    """A call for each input set, and the first set's output [B, H, 512]."""
    width = given.latent_width

    @torch.compile
    def attend(query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        logits = torch.bmm(query, rows.transpose(1, 2)).float() * scale
        return torch.bmm(logits.softmax(-1).to(rows.dtype), rows[..., :width])

    query = given.q[:, 0].contiguous()
    calls = [lambda number=number: attend(query, given.rows[number]) for number in range(len(given.rows))]
    return calls, attend(query, given.rows[0])
