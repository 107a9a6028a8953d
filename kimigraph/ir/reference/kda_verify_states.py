"""Reference of ``kimigraph::kda_verify_states``."""

import torch

from kimigraph.ir.reference.kda_tokens import kda_tokens, stacked_outputs


def kda_verify_states(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    states: torch.Tensor,
    inputs: torch.Tensor,
    out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    *,
    scale: float,
    l2_eps: float = 1e-6,
    lower_bound: float | None = None,
    norm_eps: float = 1e-5,
    state_layout: str = "kv",
) -> torch.Tensor:
    """See ``kimigraph.ir.operators.kda_verify_states``: the tokens of ``kda_decode``; only the snapshots change."""
    made = kda_tokens(
        qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight, None,
        scale=scale, l2_eps=l2_eps, lower_bound=lower_bound, norm_eps=norm_eps, state_layout=state_layout,
    )  # fmt: skip
    if made.states:
        after = torch.stack(made.states, dim=1)
        states.copy_(after.transpose(-1, -2) if state_layout == "vk" else after)
    inputs.copy_(qkv)
    return stacked_outputs(made, qkv, state.shape[1], state.shape[3 if state_layout == "kv" else 2])
