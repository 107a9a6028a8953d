"""Kimi K3, and K3.1: its skeleton with a Lightning Indexer on the MLA layers."""

import torch
from torch import Tensor, nn

from kimigraph.models.kimi_k31.attention_residual import ResidualStream
from kimigraph.models.kimi_k31.cache import Positions
from kimigraph.models.kimi_k31.configuration import KimiConfig, KimiK3Config, KimiK31Config
from kimigraph.models.kimi_k31.kda import KimiDeltaAttention
from kimigraph.models.kimi_k31.mla import LatentAttention
from kimigraph.models.kimi_k31.moe import MLP, LatentMoE
from kimigraph.models.kimi_k31.normalization import RMSNorm


class DecoderLayer(nn.Module):
    """Attention (KDA or MLA) and a feed-forward sublayer, each behind its own attention residual and pre-norm."""

    def __init__(self, config: KimiConfig, layer: int) -> None:
        super().__init__()
        dtype, hidden, eps = config.torch_dtype, config.hidden_size, config.rms_norm_eps
        self.layer = layer
        self.latent = layer in config.latent_layers
        self.self_attn = LatentAttention(config) if self.latent else KimiDeltaAttention(config)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        self.self_attention_res_norm = RMSNorm(hidden, eps, dtype)
        self.self_attention_res_proj = nn.Linear(hidden, 1, bias=False, dtype=dtype)
        self.mlp_res_norm = RMSNorm(hidden, eps, dtype)
        self.mlp_res_proj = nn.Linear(hidden, 1, bias=False, dtype=dtype)
        if layer < config.first_k_dense_replace:
            self.mlp = MLP(config, config.intermediate_size)
        else:
            self.block_sparse_moe = LatentMoE(config)
        self.dense = layer < config.first_k_dense_replace

    def forward(self, stream: ResidualStream, positions: Positions | None, cache: dict[str, Tensor]) -> None:
        """Advance the residual stream by this layer; its entries of ``cache`` change in place."""
        x = self.input_layernorm(stream.read(self.self_attention_res_norm, self.self_attention_res_proj))
        if self.latent:
            names = (f"cache.{self.layer}.{part}" for part in ("latent", "rope", "index_key"))
            out = self.self_attn(x, positions, *(cache[name] for name in names if name in cache))
        else:
            out = self.self_attn(x, cache[f"state.{self.layer}.kda"], cache[f"state.{self.layer}.conv"])
        stream.add_attention(self.layer, out)
        x = self.post_attention_layernorm(stream.read(self.mlp_res_norm, self.mlp_res_proj))
        stream.add_mlp(self.mlp(x) if self.dense else self.block_sparse_moe(x))


class KimiModel(nn.Module):
    """Embedding, decoder layers, the output's attention residual and the final norm."""

    def __init__(self, config: KimiConfig) -> None:
        super().__init__()
        dtype, hidden, eps = config.torch_dtype, config.hidden_size, config.rms_norm_eps
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.output_attn_res_norm = RMSNorm(hidden, eps, dtype)
        self.output_attn_res_proj = nn.Linear(hidden, 1, bias=False, dtype=dtype)
        self.norm = RMSNorm(hidden, eps, dtype)

    def forward(self, input_ids: Tensor, lengths: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """Hidden states [B, S, d] after the final norm."""
        positions = None
        if self.config.latent_layers:
            context = cache[f"cache.{self.config.latent_layers[0]}.latent"].shape[1]
            positions = Positions.after(lengths, input_ids.shape[1], context)
        stream = ResidualStream(self.embed_tokens(input_ids), self.config.attn_res_block_size)
        for layer in self.layers:
            layer(stream, positions, cache)
        return self.norm(stream.read(self.output_attn_res_norm, self.output_attn_res_proj))


class KimiForCausalLM(nn.Module):
    """The model with its language head, for inference: parameters need no gradient and start uninitialised.

    ``device="meta"`` builds without memory; ``initialize`` materialises. ``last_only`` models give the logits of the
    last new token alone, which is all that generation reads. Parameter names are those of published Kimi K3
    checkpoints (without their prefix), except that the filters of q, k and v are packed in ``self_attn.conv1d.weight``
    and the routed experts in ``block_sparse_moe.experts.gate_up_proj`` and ``.down_proj``.
    """

    def __init__(self, config: KimiConfig, device: torch.device | str = "cpu", last_only: bool = False) -> None:
        super().__init__()
        self.config, self.last_only = config, last_only
        with torch.device(device):
            self.model = KimiModel(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=config.torch_dtype)
        self.requires_grad_(False)
        self.eval()

    def forward(self, input_ids: Tensor, lengths: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """Logits [B, S, V] of ``input_ids`` int64 [B, S], new tokens behind ``lengths`` int32 [B] cached ones; with
        ``last_only`` [B, 1, V].

        ``cache`` is as made by ``new_cache`` and takes the new tokens in place; ``lengths`` is left alone, rows may
        differ, and ``lengths + S`` must fit the cache. S = 1 takes the decode form of KDA, more tokens the chunk form.
        """
        hidden = self.model(input_ids, lengths, cache)
        return self.lm_head(hidden[:, -1:] if self.last_only and hidden.shape[1] > 1 else hidden)


class KimiK3ForCausalLM(KimiForCausalLM):
    """Kimi K3: dense MLA layers."""

    def __init__(self, config: KimiK3Config, device: torch.device | str = "cpu", last_only: bool = False) -> None:
        super().__init__(config, device, last_only)


class KimiK31ForCausalLM(KimiForCausalLM):
    """Kimi K3.1: MLA layers over what an indexer picks."""

    def __init__(self, config: KimiK31Config, device: torch.device | str = "cpu", last_only: bool = False) -> None:
        super().__init__(config, device, last_only)
