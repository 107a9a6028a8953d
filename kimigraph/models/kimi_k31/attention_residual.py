"""Block Attention Residuals: each sublayer reads a learned softmax mix of earlier blocks instead of one running sum.

Source: the Kimi K3 technical report, equations 8 to 10.
"""

import torch
from torch import Tensor, nn

from kimigraph.models.kimi_k31.normalization import RMSNorm


def attention_residual(sources: list[Tensor], norm: RMSNorm, query: nn.Linear) -> Tensor:
    """Mix ``sources``, each [B, S, d], by softmax of the query's dot with their RMS-normalised values, per token.

    The values themselves are mixed un-normalised. fp32 with one rounding; a single source is returned as it is.
    """
    if len(sources) == 1:
        return sources[0]
    values = torch.stack(sources).float()
    effective = query.weight.float().squeeze(0) * norm.weight.float()
    logits = (values * effective).sum(-1) * torch.rsqrt(values.square().mean(-1) + norm.eps)
    mixture = torch.softmax(logits, dim=0).unsqueeze(-1)
    return (mixture * values).sum(0).to(sources[0].dtype)


class ResidualStream:
    """The finished blocks and the running sum of the current block, all [B, S, d], of one forward pass.

    Layer l of blocks of n layers: ``read`` feeds attention, ``add_attention`` takes its output (the first layer of a
    block closes the old block and starts the sum anew), ``read`` feeds the MLP, ``add_mlp`` takes its output.
    """

    def __init__(self, embedding: Tensor, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[Tensor] = []
        self.prefix = embedding

    def read(self, norm: RMSNorm, query: nn.Linear) -> Tensor:
        """The input of a sublayer with that pseudo-query."""
        return attention_residual([*self.blocks, self.prefix], norm, query)

    def add_attention(self, layer: int, output: Tensor) -> None:
        """Take the attention output of the 0-based layer."""
        if layer % self.block_size == 0:
            self.blocks.append(self.prefix)
            self.prefix = output
        else:
            self.prefix = self.prefix + output

    def add_mlp(self, output: Tensor) -> None:
        """Take the MLP output of a layer."""
        self.prefix = self.prefix + output
