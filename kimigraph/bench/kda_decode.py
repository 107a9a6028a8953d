"""The KDA decode step: operands, the reference in fp64 and the compiled kernel."""

from collections.abc import Callable
from typing import Any

import torch

from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.reference import convolved, delta_rule, gated_norm, log_decay

SIDE = 128
ATTRIBUTES: dict[str, Any] = {
    "scale": SIDE**-0.5,
    "l2_eps": 1e-6,
    "lower_bound": -5.0,
    "norm_eps": 1e-5,
    "state_layout": "vk",
}


def operands(heads: int, batch: int) -> dict[str, torch.Tensor]:
    """Random operands of ``kda_decode`` in schema order: bf16 activations, fp32 weights and state."""
    width = heads * SIDE

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    return {
        "qkv": normal(batch, 1, 3 * width),
        "conv_weight": normal(3 * width, 4, dtype=torch.float32, scale=0.5),
        "conv_state": normal(batch, 3 * width, 3),
        "gate": normal(batch, 1, width),
        "dt_bias": normal(width, dtype=torch.float32, scale=0.5),
        "a_log": torch.rand(heads, device="cuda") * 0.5 - 0.25,
        "beta": normal(batch, 1, heads),
        "state": normal(batch, heads, SIDE, SIDE, dtype=torch.float32, scale=0.3),
        "out_gate": normal(batch, 1, heads, SIDE),
        "norm_weight": 1 + normal(SIDE, dtype=torch.float32, scale=0.1),
    }


def state_bytes(heads: int, batch: int) -> int:
    """Bytes of the states of one call, once."""
    return 4 * batch * heads * SIDE * SIDE


def copies(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The operands with states of their own."""
    return {name: tensor.clone() for name, tensor in given.items()}


def expected(given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output [B, 1, H, V], state and convolution state in fp64."""
    x = {name: tensor.double() for name, tensor in given.items()}
    batch, heads = x["state"].shape[:2]
    mixed, history = convolved(x["qkv"][:, 0], x["conv_weight"], x["conv_state"])
    q, k, v = mixed.view(batch, 3, heads, SIDE).unbind(1)
    bias = x["dt_bias"].view(heads, SIDE)
    g = log_decay(x["gate"].view(batch, heads, SIDE), x["a_log"], bias, ATTRIBUTES["lower_bound"])
    strength = torch.sigmoid(x["beta"])
    rows = [
        delta_rule(q[row, None], k[row, None], v[row, None], g[row, None], strength[row], x["state"][row])
        for row in range(batch)
    ]
    out, state = torch.stack([out for out, _ in rows]), torch.stack([state for _, state in rows])
    return gated_norm(out, x["out_gate"], x["norm_weight"], ATTRIBUTES["norm_eps"]), state, history


def ours(given: dict[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The compiled kernel's launch."""
    return kernel_for("kda_decode", dict(given), ATTRIBUTES).launch
