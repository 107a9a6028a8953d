"""torch's scaled_dot_product_attention over a latent cache, heads as the queries of one head of 576 columns."""

from typing import Any

import torch

from kimigraph.bench.peers import Prepared


def latent_attention(given: Any, scale: float) -> tuple[list[Prepared], torch.Tensor]:
    """A call for each input set, and the first set's output [B, H, 512]."""
    width = given.latent_width

    def attend(number: int) -> torch.Tensor:
        rows = given.rows[number].unsqueeze(1)
        query = given.q.transpose(1, 2).reshape(len(given.q), 1, -1, given.q.shape[-1])
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(query, rows, rows[..., :width], scale=scale)

    calls = [lambda number=number: attend(number) for number in range(len(given.rows))]
    return calls, attend(0)[:, 0]
