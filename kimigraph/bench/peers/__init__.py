"""Public kernels that do the same work: an adaptor each, found where the user has installed them."""

import importlib
from collections.abc import Callable
from typing import Any

Prepared = Callable[[], Any]
"""One call on operands that were bound before."""

DECODE_PEERS = ("fla", "vllm")
PREFILL_PEERS = ("fla", "flash_kda")
INDEXER_PEERS = ("deep_gemm",)
ATTENTION_PEERS = ("flash_mla",)


class PeerUnavailableError(Exception):
    """The peer is not installed, or has no kernel for these sizes; the message says which."""


def adaptor(name: str) -> Any:
    """The module ``kimigraph.bench.peers.<name>``."""
    return importlib.import_module(f"{__name__}.{name}")
