# pyright: basic
# Reason: DeepGEMM carries no types, and vLLM's operators are only known to torch after their library is loaded.
"""DeepGEMM's ragged fp8 logits, whole in memory, then vLLM's ``top_k_per_row_prefill``: two launches."""

import importlib
import importlib.util
from typing import Any

import torch

from kimigraph.bench.peers import PeerUnavailableError, Prepared
from kimigraph.bench.peers.libraries import load

TITLE = "DeepGEMM + top_k_per_row_prefill"


def prefill(given: Any, picks: int) -> tuple[Prepared, torch.Tensor]:
    """The call, and the picks [rows, k] that it writes; its keys are contiguous, not in pages."""
    if importlib.util.find_spec("deep_gemm") is None:
        raise PeerUnavailableError("deep_gemm not found: install it, or vllm, which brings it")
    load("_C_stable_libtorch")
    deep_gemm = importlib.import_module("deep_gemm")
    keys, scales = given.contiguous()
    rows, length = given.q.shape[1], len(keys)
    first = torch.zeros(rows, dtype=torch.int32, device="cuda")
    last = (given.lengths + torch.arange(rows, device="cuda", dtype=torch.int32)).int()
    found = torch.empty(rows, picks, dtype=torch.int32, device="cuda")

    def call() -> torch.Tensor:
        logits = deep_gemm.fp8_fp4_mqa_logits((given.q[0], None), (keys, scales), given.weights[0], first, last, length)
        torch.ops._C.top_k_per_row_prefill(logits, first, last, found, rows, logits.stride(0), logits.stride(1), picks)
        return found

    return call, found
