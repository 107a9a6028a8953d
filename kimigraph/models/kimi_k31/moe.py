"""Feed-forward sublayers: SiTU, the dense MLP, and the latent mixture of experts.

Source: the Kimi K3 technical report, equation 11.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimigraph.models.kimi_k31.configuration import KimiConfig
from kimigraph.models.kimi_k31.normalization import RMSNorm


class SiTU(nn.Module):
    """``beta * tanh(gate / beta) * sigmoid(gate)`` times ``linear_beta * tanh(up / linear_beta)``, in fp32."""

    def __init__(self, beta: float, linear_beta: float | None) -> None:
        super().__init__()
        self.beta = beta
        self.linear_beta = linear_beta

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Two tensors of one shape and type; returns the same. ``linear_beta`` None leaves ``up`` uncapped."""
        wide, linear = gate.float(), up.float()
        activated = self.beta * torch.tanh(wide / self.beta) * torch.sigmoid(wide)
        if self.linear_beta is not None:
            linear = self.linear_beta * torch.tanh(linear / self.linear_beta)
        return (activated * linear).to(gate.dtype)


def activation(config: KimiConfig) -> SiTU:
    """The activation that the configuration names."""
    return SiTU(config.activation_situ_beta, config.activation_situ_linear_beta)


class MLP(nn.Module):
    """``down(SiTU(gate(x), up(x)))`` for ``x`` [.., hidden_size]."""

    def __init__(self, config: KimiConfig, width: int) -> None:
        super().__init__()
        dtype, hidden = config.torch_dtype, config.hidden_size
        self.gate_proj = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.activation = activation(config)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the shape and type of ``x``."""
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))


class Router(nn.Module):
    """Which experts a token goes to: sigmoid scores in fp32, a bias that steers the selection alone."""

    def __init__(self, config: KimiConfig) -> None:
        super().__init__()
        self.topk = config.num_experts_per_token
        self.renormalize = config.moe_renormalize
        self.scaling = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=torch.float32))
        self.e_score_correction_bias = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [N, d]; returns expert ids int64 [N, k] and their weights fp32 [N, k]."""
        scores = torch.sigmoid(F.linear(x.float(), self.weight))
        experts = torch.topk(scores + self.e_score_correction_bias, self.topk, dim=-1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return experts, weights * self.scaling


class Experts(nn.Module):
    """All routed experts in two tensors: ``gate_up_proj`` [E, 2 * I, D] (gate rows first) and ``down_proj`` [E, D, I].

    A few tokens (no more picks than experts) gather the weights they need. More tokens sort their picks by expert and
    use a grouped product, or in fp32, which the grouped product does not take, pass through every expert. Token count
    and type are static, so one of the three forms is captured.
    """

    def __init__(self, config: KimiConfig) -> None:
        super().__init__()
        count, inner, outer = config.num_experts, config.moe_intermediate_size, config.routed_expert_hidden_size
        self.count = count
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, outer, dtype=config.torch_dtype))
        self.down_proj = nn.Parameter(torch.empty(count, outer, inner, dtype=config.torch_dtype))
        self.activation = activation(config)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """``x`` [N, D], ``experts`` int64 and ``weights`` fp32 [N, k]; returns the weighted sum [N, D]."""
        if experts.numel() <= self.count:
            outputs = self.gathered(x, experts)
        elif x.dtype == torch.bfloat16:
            outputs = self.grouped(x, experts)
        else:
            outputs = self.exhaustive(x, experts)
        return (outputs.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def gathered(self, x: Tensor, experts: Tensor) -> Tensor:
        """Every pick multiplies its own copy of the expert's weights; [N, k, D]."""
        picks = experts.reshape(-1)
        rows = x.repeat_interleave(experts.shape[1], dim=0).unsqueeze(-1)
        gate, up = torch.bmm(self.gate_up_proj[picks], rows).squeeze(-1).chunk(2, dim=-1)
        inner = self.activation(gate, up).unsqueeze(-1)
        return torch.bmm(self.down_proj[picks], inner).squeeze(-1).unflatten(0, experts.shape)

    def grouped(self, x: Tensor, experts: Tensor) -> Tensor:
        """Picks sorted by expert, one product over the groups; [N, k, D]."""
        picks = experts.reshape(-1)
        order = torch.argsort(picks, stable=True)
        ends = F.one_hot(picks, self.count).sum(0).cumsum(0, dtype=torch.int32)
        rows = x[order // experts.shape[1]]
        gate, up = F.grouped_mm(rows, self.gate_up_proj.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        outputs = F.grouped_mm(self.activation(gate, up), self.down_proj.transpose(-2, -1), offs=ends)
        return outputs[torch.argsort(order)].unflatten(0, experts.shape)

    def exhaustive(self, x: Tensor, experts: Tensor) -> Tensor:
        """Every expert on every token, of which the picks are kept; [N, k, D]."""
        gate, up = torch.matmul(x, self.gate_up_proj.transpose(-2, -1)).chunk(2, dim=-1)
        outputs = torch.bmm(self.activation(gate, up), self.down_proj.transpose(-2, -1)).transpose(0, 1)
        return outputs.gather(1, experts.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class LatentMoE(nn.Module):
    """``shared(x) + up(norm(sum_i p_i expert_i(down(x))))``: routed experts work in a narrower latent space."""

    def __init__(self, config: KimiConfig) -> None:
        super().__init__()
        dtype, hidden, latent = config.torch_dtype, config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config)
        self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False, dtype=dtype)
        self.experts = Experts(config)
        self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps, dtype) if config.latent_moe_use_norm else None
        self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False, dtype=dtype)
        shared = config.num_shared_experts * config.moe_intermediate_size
        self.shared_experts = MLP(config, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, S, d]; returns the same shape and type."""
        flat = x.reshape(-1, x.shape[-1])
        experts, weights = self.gate(flat)
        routed = self.experts(self.routed_expert_down_proj(flat), experts, weights)
        if self.routed_expert_norm is not None:
            routed = self.routed_expert_norm(routed)
        out = self.routed_expert_up_proj(routed).view_as(x)
        return out if self.shared_experts is None else out + self.shared_experts(x)
