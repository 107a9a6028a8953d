# pyright: basic
# Reason: vLLM's operators are only known to torch after their library is loaded.
"""Public kernels that select the top k of rows of logits: vLLM's, and torch's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kimigraph.bench.peers.libraries import load
from kimigraph.bench.protocol import time_in_graph

WORKSPACE = 1 << 20
FIXED_SIZES, COOPERATIVE_ROWS = (512, 1024, 2048), 64


@dataclass(frozen=True)
class Selection:
    """A kernel that selects from logits [rows, length], under the name that results show."""

    name: str
    run: Callable[[torch.Tensor], object]


def selections(lengths: torch.Tensor, picks: int, length: int) -> list[Selection]:
    """What selects ``picks`` of each row; kernels of fixed sizes select the next one, which holds them all."""
    load("_C_stable_libtorch")
    rows = len(lengths)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
    fixed = next((size for size in FIXED_SIZES if size >= picks), None)
    out = torch.empty(rows, picks, dtype=torch.int32, device="cuda")
    larger = torch.empty(rows, fixed or 0, dtype=torch.int32, device="cuda")

    def per_row(logits: torch.Tensor) -> None:
        torch.ops._C.top_k_per_row_decode(logits, 1, lengths, out, rows, logits.stride(0), logits.stride(1), picks)

    def cooperative(logits: torch.Tensor) -> None:
        torch.ops._C.cooperative_topk(logits, lengths, larger, workspace, fixed, length)

    def persistent(logits: torch.Tensor) -> None:
        torch.ops._C.persistent_topk(logits, lengths, larger, workspace, fixed, length)

    def of_torch(logits: torch.Tensor) -> object:
        return torch.topk(logits[:, :length], picks, sorted=False)

    found = [Selection("top_k_per_row_decode", per_row), Selection("torch.topk", of_torch)]
    if fixed is not None:
        found.append(Selection(f"persistent_topk({fixed})", persistent))
        if rows <= COOPERATIVE_ROWS:
            found.append(Selection(f"cooperative_topk({fixed})", cooperative))
    return found


def fastest(candidates: list[Selection], logits: torch.Tensor) -> tuple[Selection, dict[str, float]]:
    """The selection that takes least time on these logits, and the median microseconds of each."""
    times = {one.name: time_in_graph([lambda one=one: one.run(logits)]).median for one in candidates}
    return min(candidates, key=lambda one: times[one.name]), times
