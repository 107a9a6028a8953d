"""Public kernels that do the same work: an adaptor each, found where the user has installed them."""

import importlib
from collections.abc import Callable
from typing import Any

Prepared = Callable[[], Any]
"""One call on operands that were bound before."""

DECODE_PEERS = ("fla", "vllm", "torch_compile_kda")
PREFILL_PEERS = ("flash_kda", "fla_chunk", "torch_compile_kda")
SLOW_PEERS = ("fla_chunk", "torch_compile_kda", "torch_compile_dsa")
"""What tunes or compiles for minutes before its first time, and so only runs by name."""

INDEXER_PEERS = ("deep_gemm", "torch_compile_dsa")
PREFILL_INDEXER_PEERS = ("deep_gemm_prefill",)
PAIR_PEERS = ("deep_gemm_flash_mla",)
LISTED_PEERS = ("flash_mla", "torch_compile_dsa")
DENSE_PEERS = ("torch_sdpa", "torch_products")
ATTENTION_PEERS = (*LISTED_PEERS, *DENSE_PEERS)
RESIDUAL_PEERS = ("fla", "vllm", "torch_compile_residual")


class PeerUnavailableError(Exception):
    """The peer is not installed, or has no kernel for these sizes; the message says which."""


def adaptor(name: str) -> Any:
    """The module ``kimigraph.bench.peers.<name>``."""
    return importlib.import_module(f"{__name__}.{name}")
