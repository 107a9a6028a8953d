# pyright: basic
# Reason: DeepGEMM carries no types.
"""DeepGEMM's paged fp8 logits, then the fastest public top-k kernel: two launches."""

import importlib
import importlib.util
from typing import Any

import torch

from kimigraph.bench.peers import PeerUnavailableError, Prepared
from kimigraph.bench.peers.top_k import fastest, selections

TITLE = "DeepGEMM + vLLM top-k"


def indexer(given: Any, picks: int) -> list[Prepared]:
    """A call for each input set; workspace and schedule are made once."""
    return described(given, picks)[0]


def described(given: Any, picks: int) -> tuple[list[Prepared], dict[str, Any]]:
    """The calls, and for the record which selection they use, with the median of each one on warm logits."""
    logits = logits_of(given)
    select, times = fastest(selections(given.lengths, picks, int(given.lengths.max())), logits(0))
    record = {"selection": select.name, "selections_us": {name: round(time, 3) for name, time in times.items()}}
    return [lambda number=number: select.run(logits(number)) for number in range(len(given.q))], record


def logits_of(given: Any) -> Any:
    """What computes the logits [B, length] of an input set."""
    if importlib.util.find_spec("deep_gemm") is None:
        raise PeerUnavailableError("deep_gemm not found: install it, or vllm, which brings it")
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

    return logits
