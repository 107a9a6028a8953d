"""The multi-token-prediction layer of a checkpoint as a step: what the model's head reads to guesses of further tokens.

    h' = norm(block(eh_proj(cat(enorm(embed(t)), hnorm(h)))))

``h`` is what the model's output head reads of a token (behind the final norm), ``t`` the token behind it, at the place
of ``h``. ``h'`` takes the place of ``h`` for the next token.

Source: the DeepSeek-V3 technical report, 2.2 (in the order of the published ``eh_proj``, the embedding first).
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kimigraph.adapters import transformers_models as adapter
from kimigraph.adapters.transformers_cache import CacheTensor
from kimigraph.adapters.transformers_draft_head import empty_head, head_config, require_head
from kimigraph.capture.example import StepExample, StepInput
from kimigraph.capture.hints import CaptureHints, InputHint
from kimigraph.capture.rows import LayerRows, RowsCache, row_tensors
from kimigraph.capture.shape import step_shape
from kimigraph.capture.source import Loaded, ModelSource
from kimigraph.capture.transformers_source import configuration, step_inputs
from kimigraph.capture.weights import dtype_name, dtype_named, seed_weights
from kimigraph.ir.config import CompileConfig
from kimigraph.models.kimi_k31.cache import Positions
from kimigraph.weights import layout_of, load_module


class DraftHeadStep(nn.Module):
    """``forward(input_ids, hidden, lengths, cache)``: tokens int64 [B, S], each behind the one that ``hidden``
    [B, S, hidden size] is of; ``lengths`` int32 [B], what the layer's caches hold.

    Returns logits [B, S, vocabulary] (of the last token alone with ``last_only``), and the hidden states that go on.
    """

    def __init__(
        self, model: nn.Module, tensors: tuple[CacheTensor, ...], layer: int, context: int, last_only: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.layer, self.context, self.last_only = layer, context, last_only
        self.names = tuple((item.role, item.name) for item in tensors)

    def forward(
        self, input_ids: Tensor, hidden: Tensor, lengths: Tensor, cache: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """One step; see the class."""
        positions = Positions.after(lengths, input_ids.shape[1], self.context)
        rows = LayerRows(positions, lengths, pooled=False)
        rows.tensors = {role: cache[name] for role, name in self.names}
        model: Any = self.model
        block = model.model.layers[str(self.layer)]
        embedded = block.enorm(model.model.embed_tokens(input_ids))
        mixed = block.eh_proj(torch.cat([embedded, block.hnorm(hidden)], dim=-1))
        made = block(
            mixed,
            attention_mask=positions.visible.unsqueeze(1),
            position_ids=positions.columns,
            position_embeddings=model.model.rotary_emb(mixed, position_ids=positions.columns),
            cache=RowsCache({self.layer: rows}),
            use_cache=True,
        )
        made = block.shared_head.norm(made[0] if isinstance(made, tuple) else made)
        last = self.last_only and input_ids.shape[1] > 1
        return model.lm_head(made[:, -1:] if last else made), made


def draft_head_source(
    directory: Path, document: dict[str, Any], config: CompileConfig, weight_seed: int | None
) -> ModelSource:
    """The layer behind the last one of the model in ``directory``. UsageError, with the remedy, where it has none."""
    document, model_config = configuration(directory, document, config)
    require_head(model_config, str(directory / "config.json"))
    shape = step_shape(config, model_config.max_position_embeddings)
    dtype = dtype_named(config.dtype or dtype_name(model_config.dtype or torch.float32))
    extended, layer = head_config(model_config), model_config.num_hidden_layers
    caches = adapter.new_cache(extended, shape.batch, shape.context, dtype, False)[1]
    tensors = tuple(item for item in row_tensors(caches) if item.layer == layer)
    hidden = StepInput("hidden", (shape.batch, shape.tokens, model_config.hidden_size), dtype, InputHint("input"))
    ids, *others = step_inputs(model_config, shape, tensors, rows=True)
    inputs = (ids, hidden, *others)
    example = StepExample(shape, inputs, config.seed)
    hints = CaptureHints({item.name: item.hint for item in inputs}, ("logits", "hidden_states"), adapter.PREFIX)
    return ModelSource(
        name=f"{directory.resolve().name}-mtp",
        model_type=document["model_type"],
        phase=config.phase,
        load=partial(_load, directory, model_config, dtype, weight_seed, example, tensors),
        shape=shape,
        inputs=inputs,
        hints=hints,
        document={**document, "dtype": dtype_name(dtype), "draft_head": True},
        random_weights=weight_seed is not None,
        weight_seed=weight_seed,
    )


def _load(
    directory: Path,
    model_config: Any,
    dtype: torch.dtype,
    weight_seed: int | None,
    example: StepExample,
    tensors: tuple[CacheTensor, ...],
    device: str,
) -> Loaded:
    model = empty_head(model_config, dtype, "meta" if device == "meta" else "cpu")
    if device == "cpu":
        if weight_seed is None:
            load_module(model, directory, layout_of(model_config.model_type), partly=True)
        else:
            seed_weights(model, weight_seed)
    last_only = example.shape.phase != "verify"
    module = DraftHeadStep(model, tensors, model_config.num_hidden_layers, example.shape.context, last_only)

    def arguments(length: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = example.tensors(length)
        return (*(given.pop(name) for name in ("input_ids", "hidden", "lengths")), given), {}

    return Loaded(module, arguments)
