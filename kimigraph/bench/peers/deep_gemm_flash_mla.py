# pyright: basic
# Reason: DeepGEMM carries no types, and vLLM's operators are only known to torch after their library is loaded.
"""The pair of public kernels: DeepGEMM's logits, the fastest top-k, FlashMLA; three launches or more in one graph."""

from typing import Any

import torch

from kimigraph.bench.peers import Prepared, deep_gemm, flash_mla

TITLE = "DeepGEMM + top-k + FlashMLA"


def pair(given: Any, lists: torch.Tensor, scale: float) -> tuple[list[Prepared], dict[str, Any]]:
    """A call for each input set: the indexer on its keys, attention over ``lists`` [., B, 1, k], rows of the pool."""
    select, record = deep_gemm.described(given.indexer, lists.shape[-1])
    attend, _ = flash_mla.attention(given.listed(lists), scale)

    def call(number: int) -> None:
        select[number]()
        attend[number % len(attend)]()

    return [lambda number=number: call(number) for number in range(len(select))], record
