"""Marks: known reference functions replaced by the operator that they are, while more than one token is captured.

The chunk form of the delta rule unrolls into some thousand ATen nodes a layer; one function call says the same. Decode
steps carry no marks: there the patterns of the passes find everything.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kimigraph.ir.config import CompileConfig

_SWAPPING = threading.RLock()


@dataclass(frozen=True)
class Mark:
    """One known function: the module in whose globals it is called, its name there, and what replaces it."""

    module: str
    function: str
    replacement: Callable[..., Any]


@contextmanager
def marked(config: CompileConfig) -> Generator[None]:
    """Replace the known functions of loaded modules inside the block, but for a decode step and without marks.

    One capture at a time swaps; the originals come back on any way out.
    """
    if not config.marks or config.phase == "decode":
        yield
        return
    importlib.import_module("kimigraph.ir.operators")
    with _SWAPPING:
        swapped: list[tuple[Any, str, Any]] = []
        try:
            for mark in MARKS:
                module = sys.modules.get(mark.module)
                if module is not None and hasattr(module, mark.function):
                    swapped.append((module, mark.function, getattr(module, mark.function)))
                    setattr(module, mark.function, mark.replacement)
            yield
        finally:
            for module, name, original in reversed(swapped):
                setattr(module, name, original)


def is_mark(node: Node) -> bool:
    """Whether a captured node stands where a known function was."""
    return node.op == "call_function" and getattr(node.target, "namespace", None) == "kimigraph"


def _kda_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, l2_norm: bool, layout: str
) -> tuple[Tensor, Tensor]:
    return torch.ops.kimigraph.kda_prefill(
        q, k, v, g, beta, state, scale=q.shape[-1] ** -0.5, l2_norm=l2_norm, l2_eps=1e-6, state_layout=layout
    )


def _transformers_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """``chunk_kimi_delta_attention`` of transformers: states are [B, H, K, V]."""
    out, state = _kda_prefill(query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel, "kv")
    return out.to(query.dtype), state if output_final_state else None


def _gated_delta_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """``torch_chunk_gated_delta_rule`` of transformers (GDN): one decay a head, q and k perhaps of fewer heads."""
    group = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(group, dim=2) if group > 1 else x for x in (query, key))
    decay = g.float().unsqueeze(-1).expand(*g.shape, key.shape[-1])
    return _transformers_chunks(
        query, key, value, decay, beta, chunk_size, initial_state, output_final_state, use_qk_l2norm_in_kernel
    )


def _kimi_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """``chunk_kimi_delta_attention`` of ``kimigraph.models.kimi_k31``: states are [B, H, V, K]."""
    return _kda_prefill(q, k, v, g, beta, initial_state, True, "vk")


def _kimi_convolution(x: Tensor, weight: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
    """``short_convolution`` of ``kimigraph.models.kimi_k31``: SiLU inside."""
    return torch.ops.kimigraph.short_conv(x, weight, initial_state, activation=True)


MARKS = (
    Mark("transformers.models.glm5_next.modeling_glm5_next", "chunk_kimi_delta_attention", _transformers_chunks),
    Mark("transformers.models.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention", _transformers_chunks),
    Mark("transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule", _gated_delta_chunks),
    Mark("kimigraph.models.kimi_k31.kda", "chunk_kimi_delta_attention", _kimi_chunks),
    Mark("kimigraph.models.kimi_k31.kda", "short_convolution", _kimi_convolution),
)
