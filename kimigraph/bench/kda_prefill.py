"""KDA prefill: operands, the reference in fp64 and the compiled kernels."""

from collections.abc import Callable
from typing import Any

import torch

from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.reference import delta_rule, log_decay

SIDE = 128
LOWER_BOUND = -5.0
ATTRIBUTES: dict[str, Any] = {
    "scale": SIDE**-0.5,
    "l2_norm": True,
    "l2_eps": 1e-6,
    "lower_bound": LOWER_BOUND,
    "state_layout": "vk",
}
CHECKED_HEADS = 2  # by the token loop
CHECKED_TOKENS = 4096


def operands(heads: int, lengths: tuple[int, ...]) -> dict[str, torch.Tensor | None]:
    """Random operands of ``kda_prefill`` in schema order, gate and strength as raw logits; packed when several."""
    tokens = sum(lengths)
    edges = torch.tensor([0, *lengths], device="cuda").cumsum(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    q, k, v, g = (normal(1, tokens, heads, SIDE) for _ in range(4))
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": normal(1, tokens, heads),
        "initial_state": normal(len(lengths), heads, SIDE, SIDE, dtype=torch.float32, scale=0.3),
        "a_log": torch.rand(heads, device="cuda") * 0.5 - 0.25,
        "dt_bias": normal(heads, SIDE, dtype=torch.float32, scale=0.5),
        "cu_seqlens": edges if len(lengths) > 1 else None,
    }


def expected(given: dict[str, Any], lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """In fp64, of the first heads: read-outs of the first sequence's first tokens; its state if those are all."""
    tokens = min(lengths[0], CHECKED_TOKENS)
    picked = [given[name][0, :tokens, :CHECKED_HEADS].double() for name in ("q", "k", "v", "g", "beta")]
    q, k, v, logit, strength = picked
    a_log, bias = given["a_log"][:CHECKED_HEADS].double(), given["dt_bias"][:CHECKED_HEADS].double()
    state = given["initial_state"][0, :CHECKED_HEADS].double()
    out, state = delta_rule(q, k, v, log_decay(logit, a_log, bias, LOWER_BOUND), torch.sigmoid(strength), state)
    return out, state if tokens == lengths[0] else None


def ours(given: dict[str, torch.Tensor | None]) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """The compiled kernels on these operands."""
    launch = kernel_for("kda_prefill", given, ATTRIBUTES).launch
    return lambda: launch(*given.values())
