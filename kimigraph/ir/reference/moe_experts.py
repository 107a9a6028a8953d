"""Reference of ``kimigraph::moe_experts``."""

import torch
from torch import Tensor

from kimigraph.ir.reference.mxfp4_quantize import mxfp4_dequantize


def moe_experts(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    norm_weight: Tensor | None = None,
    up: Tensor | None = None,
    shared_gate: Tensor | None = None,
    shared_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    picks: int,
    renormalize: bool,
    scale: float = 1.0,
    groups: int = 1,
    group_picks: int = 1,
    activation: str = "swiglu",
    beta: float = 1.0,
    linear_beta: float | None = None,
    limit: float | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """See ``kimigraph.ir.operators.moe_experts``: in fp32, expert by expert for the tokens that chose it."""
    scores = torch.sigmoid(logits.float())
    chosen = choose_experts(scores if bias is None else scores + bias.float(), picks, groups, group_picks)
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    weights = weights * scale
    routed = torch.zeros_like(x, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, linear = (x[token].float() @ real_weight(gate_up[expert]).t()).chunk(2, dim=1)
        hidden = gated(gate, linear, activation, beta, linear_beta, limit) * weights[token, place, None]
        routed[token] += hidden @ real_weight(down[expert]).t()
    out = routed
    if norm_weight is not None:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    if up is not None:
        out = out @ up.float().t()
    if shared_gate is not None and shared_up is not None and shared_down is not None:
        hidden = gated(shared_gate.float(), shared_up.float(), activation, beta, linear_beta, limit)
        out = out + hidden @ shared_down.float().t()
    if residual is not None:
        out = out + residual.float()
    return out.to(x.dtype), chosen.to(torch.int32).clone(memory_format=torch.contiguous_format)


def real_weight(weight: Tensor) -> Tensor:
    """A weight in fp32: of a float type, or MXFP4 in bytes."""
    return mxfp4_dequantize(weight) if weight.dtype == torch.uint8 else weight.float()


def choose_experts(choice: Tensor, picks: int, groups: int, group_picks: int) -> Tensor:
    """Experts of each token [N, picks], best first, ties to the smaller index; NaN counts as -inf."""
    choice = torch.where(choice.isnan(), torch.full_like(choice, float("-inf")), choice)
    if groups > 1:
        grouped = choice.unflatten(1, (groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.sort(best, dim=1, descending=True, stable=True).indices[:, :group_picks]
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1)
    return torch.sort(choice, dim=1, descending=True, stable=True).indices[:, :picks]


def gated(
    gate: Tensor, linear: Tensor, activation: str, beta: float, linear_beta: float | None, limit: float | None
) -> Tensor:
    """SwiGLU or SiTU of fp32 tensors, bounded by ``limit`` first if there is one."""
    if limit is not None:
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    if activation == "swiglu":
        return torch.nn.functional.silu(gate) * linear
    if linear_beta is not None:
        linear = linear_beta * torch.tanh(linear / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * linear
