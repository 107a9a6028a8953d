"""torch.compile over the eager spelling: what a user has without a kernel of their own."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from kimigraph.bench.peers import PeerUnavailableError, Prepared

TITLE = "torch.compile"


def residual(given: Sequence[dict[str, Any]], eps: float) -> list[Prepared]:
    """Attention residuals with the norm behind them, as a model spells them."""

    def eager(
        sources: list[torch.Tensor], query: torch.Tensor, norm: torch.Tensor, out_norm: torch.Tensor
    ) -> torch.Tensor:
        values = torch.stack(sources).float()
        logits = (values * (query.float() * norm.float())).sum(-1) * torch.rsqrt(values.square().mean(-1) + eps)
        mixed = (torch.softmax(logits, 0).unsqueeze(-1) * values).sum(0)
        mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + eps)
        return (mixed * out_norm.float()).to(sources[0].dtype)

    compiled = cast("Callable[..., torch.Tensor]", torch.compile(eager, dynamic=False, fullgraph=True))
    try:
        compiled(*given[0].values())
    except Exception as error:  # whatever stops the compiler: no C compiler, above all
        raise PeerUnavailableError(f"torch.compile fails here: {' '.join(str(error).split())[:200]}") from error
    return [lambda one=one: compiled(*one.values()) for one in given]
