# pyright: basic
# Reason: the operator is only known to torch after its library is loaded.
"""vLLM's ``fused_kda_decode``: convolution to gated norm in one launch; its attention residual and group quantiser."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kimigraph.bench.peers import PeerUnavailableError, Prepared
from kimigraph.bench.peers.libraries import load

HEADS = (12, 24, 48, 96)
TITLE = "vLLM fused_kda_decode"


def decode(given: dict[str, torch.Tensor], attributes: dict[str, Any]) -> tuple[Prepared, dict[str, torch.Tensor]]:
    """A call on copies of the operands in vLLM's layouts, and what it writes: out, state, conv_state, as ours are."""
    load("_C_stable_libtorch")
    batch, heads, side, _ = given["state"].shape
    if heads not in HEADS:
        raise PeerUnavailableError(f"{TITLE} is built for {', '.join(map(str, HEADS))} heads, not {heads}")
    width = heads * side
    # Slot 0 is the null slot. Columns of the convolution state lie channels-innermost.
    state = torch.cat([torch.zeros_like(given["state"][:1]), given["state"]])
    columns = torch.cat([torch.zeros_like(given["conv_state"][:1]), given["conv_state"]])
    columns = columns.transpose(1, 2).contiguous().transpose(1, 2)
    taps = given["conv_weight"].view(3, width, 4).transpose(1, 2).contiguous()
    slots = torch.arange(1, batch + 1, device=state.device, dtype=torch.int32)
    out = torch.full((1, batch, heads, side), torch.nan, device=state.device, dtype=given["qkv"].dtype)
    arguments = (
        given["qkv"][:, 0].contiguous(), taps, None, columns, given["gate"].view(1, batch, heads, side),
        given["beta"].view(1, batch, heads), given["a_log"], given["dt_bias"].view(heads, side), slots, state, out,
        attributes["lower_bound"], given["out_gate"].view(1, batch, heads, side), given["norm_weight"],
        attributes["norm_eps"],
    )  # fmt: skip
    written = {"out": out.view(batch, 1, heads, side), "state": state[1:], "conv_state": columns[1:]}
    return lambda: torch.ops._C.fused_kda_decode(*arguments), written


def residual(given: Sequence[dict[str, Any]], eps: float) -> list[Prepared]:
    """``kimi_k3_attn_res`` over blocks in one tensor [T, blocks, D]; vLLM builds it for compute capability 10 alone."""
    load("_C_stable_libtorch")
    if torch.cuda.get_device_capability()[0] < 10:
        raise PeerUnavailableError("vLLM's kimi_k3_attn_res runs on compute capability 10 only")

    def prepare(one: dict[str, Any]) -> Prepared:
        *blocks, partial = one["sources"]
        stacked, out = torch.stack(blocks, 1), torch.empty_like(partial)
        weights = (one["norm_weight"], one["query"], one["out_norm_weight"])

        def call() -> torch.Tensor:
            torch.ops._C.kimi_k3_attn_res(partial, None, stacked, *weights, out, len(blocks), -1, eps, eps)
            return out

        return call

    return [prepare(one) for one in given]


def group_quantiser(group: int, least: float, power2: bool) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """``per_token_group_fp8_quant`` as a function of [T, D]: codes and fp32 scales, allocated as ours are."""
    load("_C_stable_libtorch")

    def quantise(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scales = torch.empty(len(x), x.shape[-1] // group, device=x.device)
        torch.ops._C.per_token_group_fp8_quant(x, codes, scales, group, least, -448.0, 448.0, power2, False, False)
        return codes, scales

    return quantise
