# pyright: basic
# Reason: compiled functions carry no types.
"""Indexer and sparse attention as torch.compile makes them of bf16 tensors: contiguous keys, a gather and a softmax."""

from typing import Any

import torch

from kimigraph.bench.peers import Prepared

TITLE = "torch.compile, bf16"
LATENT, WIDTH, PAGE = 512, 128, 64


def described(given: Any, picks: int) -> tuple[list[Prepared], dict[str, Any]]:
    """A call for each input set, on bf16 keys without pages; scores in fp32, then torch.topk."""

    def select(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        dots = torch.relu(torch.matmul(q, keys.transpose(1, 2)).float())
        return torch.topk((dots * weights.unsqueeze(-1)).sum(1), picks, sorted=False).indices

    compiled = torch.compile(select, dynamic=False)
    calls: list[Prepared] = []
    for number in range(min(len(given.q), 4)):
        q, weights = given.q[number, :, 0].bfloat16(), given.weights[number, :, 0]
        keys = index_keys(given.pages, given.tables[number])
        compiled(q, keys, weights)
        calls.append(lambda q=q, keys=keys, weights=weights: compiled(q, keys, weights))
    return calls, {"form": "bf16 keys, torch.topk"}


def index_keys(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The keys of each sequence, bf16 [B, L, 128]."""
    flat = pages.view(len(pages), -1)
    keys = []
    for row in table.long():
        values = flat[row, : PAGE * WIDTH].view(-1, WIDTH).view(torch.float8_e4m3fn).float()
        scales = flat[row, PAGE * WIDTH :].contiguous().view(torch.float32).flatten()
        keys.append((values * scales.unsqueeze(1)).bfloat16())
    return torch.stack(keys)


def attention(given: Any, scale: float) -> tuple[list[Prepared], torch.Tensor]:
    """A call for each input set, on bf16 rows; and the first set's output [B, 1, H, 512]."""

    def attend(q: torch.Tensor, rows: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        keys = rows[picks]
        weights = torch.softmax(torch.matmul(q, keys.transpose(1, 2)).float() * scale, -1)
        return torch.matmul(weights.to(keys.dtype), keys[..., :LATENT])

    compiled = torch.compile(attend, dynamic=False)
    scales = given.rows[:, LATENT : LATENT + 16].contiguous().view(torch.float32).repeat_interleave(128, 1)
    latent = (given.rows[:, :LATENT].view(torch.float8_e4m3fn).float() * scales).bfloat16()
    rows = torch.cat([latent, given.rows[:, LATENT + 16 :].contiguous().view(torch.bfloat16)], 1)
    q, lists = given.q[:, 0], [picks[:, 0].long() for picks in given.lists]
    result = compiled(q, rows, lists[0])
    calls = [lambda picks=picks: compiled(q, rows, picks) for picks in lists]
    return calls, result.unsqueeze(1)
