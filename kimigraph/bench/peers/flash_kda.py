# pyright: basic
# Reason: the operators are only known to torch after their library is loaded.
"""FlashKDA (CUTLASS): chunks of 16, gate, norms and strength inside."""

from typing import Any

import torch

from kimigraph.bench.peers import Prepared
from kimigraph.bench.peers.libraries import load

TITLE = "FlashKDA"


def prefill(given: dict[str, Any], attributes: dict[str, Any]) -> tuple[Prepared, dict[str, torch.Tensor]]:
    """A call on the operands, and what it writes."""
    load("_flashkda_C")
    tokens, heads = given["q"].shape[1:3]
    sequences = given["initial_state"].shape[0]
    size = torch.ops._flashkda_C.get_workspace_size(tokens, heads, sequences)
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    out = torch.full_like(given["v"], torch.nan)
    final = torch.full_like(given["initial_state"], torch.nan)
    arguments = (
        given["q"], given["k"], given["v"], given["g"], given["beta"], attributes["scale"], out, workspace,
        given["a_log"], given["dt_bias"], attributes["lower_bound"], given["initial_state"], final,
        given["cu_seqlens"], None, None,
    )  # fmt: skip
    return lambda: torch.ops._flashkda_C.fwd(*arguments), {"out": out, "final_state": final}
