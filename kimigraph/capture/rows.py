"""Models of transformers as steps over rows that differ in length: ``forward(input_ids, lengths, cache) -> logits``.

The logits are those of the last new token, [B, 1, vocabulary]: generation reads no others but where it verifies drafts.

transformers counts the tokens of its static caches once for a batch. Generation needs a count for each row: here the
caches are plain tensors [B, T, .], written where each row's new tokens stand, and masks and positions follow from
``lengths``. Steps continue: a sequence without tokens has states of zero.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kimigraph.adapters.transformers_cache import CacheTensor
from kimigraph.models.kimi_k31.cache import Positions


def row_tensors(tensors: tuple[CacheTensor, ...]) -> tuple[CacheTensor, ...]:
    """The tensors of a step over rows in place of a static cache's: no counters, latents and rope parts [B, T, .]."""
    kept = (item for item in tensors if item.role not in ("length", "index_length"))
    return tuple(
        replace(item, shape=(item.shape[0], *item.shape[2:])) if item.role in ("latent", "rope") else item
        for item in kept
    )


class RowsStep(nn.Module):
    """A causal language model of transformers over rows of their own length; see the module.

    ``forward(input_ids, lengths, cache)``: ``input_ids`` int64 [B, S], ``lengths`` int32 [B] (tokens before the step),
    ``cache`` maps the names of ``row_tensors`` to tensors, updated in place. Returns logits
    [B, 1, vocabulary] of the last token, or [B, S, vocabulary] without ``last_only``. A model whose indexer pools its
    keys takes several tokens for a single row only. ``with_hidden``: beside them what the head reads, of all tokens,
    [B, S, hidden size].
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: tuple[CacheTensor, ...],
        layers: int,
        context: int,
        last_only: bool = True,
        with_hidden: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.layers, self.context, self.last_only, self.with_hidden = layers, context, last_only, with_hidden
        self.pooled = any(item.role == "index_packed" for item in tensors)
        self.names = tuple((item.layer, item.role, item.name) for item in tensors)

    def forward(self, input_ids: Tensor, lengths: Tensor, cache: dict[str, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
        """One step; see the class."""
        positions = Positions.after(lengths, input_ids.shape[1], self.context)
        rebuilt = RowsCache([LayerRows(positions, lengths, self.pooled) for _ in range(self.layers)])
        for layer, role, name in self.names:
            rebuilt.layers[layer].tensors[role] = cache[name]
        model: Any = self.model
        given: dict[str, Any] = {
            "input_ids": input_ids,
            "position_ids": positions.columns,
            "cache": rebuilt,
            "use_cache": True,
        }
        given["attention_mask"] = _Masks(positions.visible, self.pooled)
        last = self.last_only and input_ids.shape[1] > 1
        if hasattr(model.model, "language_model"):
            hidden = model.model.language_model(**given).last_hidden_state
            return model.lm_head(hidden[:, -1:] if last else hidden)
        if self.with_hidden:
            hidden = model.model(**given).last_hidden_state
            return model.lm_head(hidden[:, -1:] if last else hidden), hidden
        return model(**given, logits_to_keep=int(last)).logits


class _Masks(dict[str, Any]):
    """The mask of each kind of layer. Linear attention has none; pooled indexers make their own from valid places."""

    def __init__(self, visible: Tensor, pooled: bool) -> None:
        if pooled:
            every = torch.ones(visible.shape[:2], dtype=torch.bool, device=visible.device)
            super().__init__(indexed_attention=every, linear_attention=every)
        else:
            mask = visible.unsqueeze(1)
            super().__init__(indexed_attention=mask, full_attention=mask, linear_attention=None)


class LayerRows:
    """What a layer of transformers asks of its part of the cache."""

    def __init__(self, positions: Positions, lengths: Tensor, pooled: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._positions, self._lengths, self._pooled = positions, lengths, pooled

    @property
    def keys(self) -> Tensor:
        """The latents [B, 1, T, L]."""
        return self.tensors["latent"].unsqueeze(1)

    def get_seq_length(self) -> Tensor | int:
        """The tokens after the step, which pooled indexers ask for.

        A single token of each row sees every place that holds a token, so the count is that of all places then.
        """
        tokens = self._positions.columns.shape[1]
        return self._lengths[0] + tokens if tokens > 1 else self.tensors["latent"].shape[1]

    def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take new latents and rope parts [B, 1, S, .] in; returns all of them, [B, 1, T, .]."""
        latents = self._positions.write(self.tensors["latent"], keys[:, 0])
        if "rope" not in self.tensors:  # of width 0
            return latents.unsqueeze(1), latents.new_empty(*latents.shape[:2], 0).unsqueeze(1)
        return latents.unsqueeze(1), self._positions.write(self.tensors["rope"], values[:, 0]).unsqueeze(1)

    def update_indexer(self, keys: Tensor) -> Tensor:
        """Take new index keys [B, S, D] in; returns all of them, [B, T, D]."""
        return self._positions.write(self.tensors["index_packed" if self._pooled else "index_key"], keys)

    def update_conv_state(self, inputs: Tensor) -> Tensor:
        """Take new inputs [B, C, S] of the convolution in; returns them behind those that the state held."""
        state = self.tensors["conv"]
        window = torch.cat([state, inputs.to(state.dtype)], dim=-1)
        state.copy_(window[..., -state.shape[-1] :])
        return window


class RowsCache:
    """What a model of transformers asks of a cache."""

    def __init__(self, layers: Sequence[LayerRows] | Mapping[int, LayerRows]) -> None:
        self.layers = layers

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        return self.layers[layer_idx].update(keys, values)

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        return self.layers[layer_idx].update_indexer(keys)

    def get_conv_state(self, layer_idx: int, **_: Any) -> Tensor:
        return self.layers[layer_idx].tensors["conv"]

    def get_recurrent_state(self, layer_idx: int, **_: Any) -> Tensor:
        return self.layers[layer_idx].tensors["kda"]

    def update_conv_state(self, inputs: Tensor, layer_idx: int, **_: Any) -> Tensor:
        return self.layers[layer_idx].update_conv_state(inputs)

    def update_recurrent_state(self, states: Tensor, layer_idx: int, **_: Any) -> Tensor:
        return self.layers[layer_idx].tensors["kda"].copy_(states)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor | int:
        return self.layers[layer_idx].get_seq_length()
