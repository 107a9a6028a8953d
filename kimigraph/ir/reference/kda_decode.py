"""Reference of ``kimigraph::kda_decode``."""

import torch

from kimigraph.ir.reference.kda_tokens import kda_tokens, stacked_outputs


def kda_decode(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    gate_weight: torch.Tensor | None = None,
    *,
    scale: float,
    l2_eps: float = 1e-6,
    lower_bound: float | None = None,
    norm_eps: float = 1e-5,
    state_layout: str = "kv",
) -> torch.Tensor:
    """See ``kimigraph.ir.operators.kda_decode``: token by token in fp32; conv_state and state change in place."""
    if slots is not None:
        live = slots > 0
        entries = slots.clamp_min(0).long()
        own_conv, own_state = conv_state[entries], state[entries]
        out = kda_decode(
            qkv, conv_weight, own_conv, gate, dt_bias, a_log, beta, own_state, out_gate, norm_weight, None, gate_weight,
            scale=scale, l2_eps=l2_eps, lower_bound=lower_bound, norm_eps=norm_eps, state_layout=state_layout,
        )  # fmt: skip
        conv_state[entries[live]] = own_conv[live]
        state[entries[live]] = own_state[live]
        return torch.where(live.reshape(-1, 1, 1, 1), out, torch.zeros_like(out))
    made = kda_tokens(
        qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight, gate_weight,
        scale=scale, l2_eps=l2_eps, lower_bound=lower_bound, norm_eps=norm_eps, state_layout=state_layout,
    )  # fmt: skip
    conv_state.copy_(made.window[..., qkv.shape[1] :])
    if made.states:
        state.copy_(made.states[-1].transpose(-1, -2) if state_layout == "vk" else made.states[-1])
    return stacked_outputs(made, qkv, state.shape[1], state.shape[3 if state_layout == "kv" else 2])
