# pyright: basic
# Reason: DeepGEMM carries no types, and vLLM's operators are only known to torch after their library is loaded.
"""DeepGEMM's paged fp8 logits, then the fastest of vLLM's top-k kernels: two launches."""

import importlib
import importlib.util
from typing import Any

import torch

from kimigraph.bench.peers import PeerUnavailableError, Prepared
from kimigraph.bench.peers.libraries import load
from kimigraph.bench.protocol import time_in_graph

TITLE = "DeepGEMM + vLLM top-k"
WORKSPACE = 1 << 20
COOPERATIVE_SIZES, COOPERATIVE_ROWS = (512, 1024, 2048), 64


def indexer(given: Any, picks: int) -> list[Prepared]:
    """A call for each input set; workspace and schedule are made once, logits are compared with ours beforehand."""
    if importlib.util.find_spec("deep_gemm") is None:
        raise PeerUnavailableError("deep_gemm not found: install it, or vllm, which brings it")
    load("_C_stable_libtorch")
    deep_gemm = importlib.import_module("deep_gemm")
    batch, length = len(given.lengths), int(given.lengths.max())
    context = given.lengths.view(batch, 1)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(context, 64, deep_gemm.get_num_sms())
    pages = given.pages.view(-1, 64, 1, 132)

    def logits(number: int) -> torch.Tensor:
        weights = given.weights[number].view(batch, -1)
        return deep_gemm.fp8_fp4_paged_mqa_logits(
            (given.q[number], None), pages, weights, context, given.tables[number], schedule, length
        )

    select = fastest(selections(given, picks, length), logits(0))
    return [lambda number=number: select(logits(number)) for number in range(len(given.q))]


def selections(given: Any, picks: int, length: int) -> list[Any]:
    """What selects ``picks`` of a row of logits."""
    batch = len(given.lengths)
    out = torch.empty(batch, picks, dtype=torch.int32, device="cuda")
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")

    def per_row(logits: torch.Tensor) -> None:
        torch.ops._C.top_k_per_row_decode(
            logits, 1, given.lengths, out, batch, logits.stride(0), logits.stride(1), picks
        )

    def cooperative(logits: torch.Tensor) -> None:
        torch.ops._C.cooperative_topk(logits, given.lengths, out, workspace, picks, length)

    def persistent(logits: torch.Tensor) -> None:
        torch.ops._C.persistent_topk(logits, given.lengths, out, workspace, picks, length)

    fits = picks in COOPERATIVE_SIZES
    return [per_row, *([cooperative] if fits and batch <= COOPERATIVE_ROWS else []), *([persistent] if fits else [])]


def fastest(candidates: list[Any], logits: torch.Tensor) -> Any:
    """The selection that takes least time on these logits."""
    times = {select: time_in_graph([lambda select=select: select(logits)]).median for select in candidates}
    return min(times, key=times.__getitem__)
