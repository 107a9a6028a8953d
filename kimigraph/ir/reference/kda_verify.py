"""Reference of ``kimigraph::kda_verify``."""

import torch

from kimigraph.ir.reference.kda_tokens import kda_tokens, stacked_outputs


def kda_verify(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    decays: torch.Tensor,
    deltas: torch.Tensor,
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
    """See ``kimigraph.ir.operators.kda_verify``: the tokens of ``kda_decode``; only the records change."""
    made = kda_tokens(
        qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight, None,
        scale=scale, l2_eps=l2_eps, lower_bound=lower_bound, norm_eps=norm_eps, state_layout=state_layout,
    )  # fmt: skip
    for records, values in ((keys, made.keys), (decays, made.decays), (deltas, made.deltas)):
        if values:
            records.copy_(torch.stack(values, dim=1))
    inputs.copy_(qkv)
    return stacked_outputs(made, qkv, state.shape[1], state.shape[3 if state_layout == "kv" else 2])
