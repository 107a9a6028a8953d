"""Model types of transformers as sources."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimigraph.adapters import transformers_models as adapter
from kimigraph.adapters.transformers_cache import CacheTensor
from kimigraph.adapters.transformers_draft_head import require_head
from kimigraph.capture.example import StepExample, StepInput
from kimigraph.capture.hints import CaptureHints, InputHint
from kimigraph.capture.overrides import apply_overrides
from kimigraph.capture.rows import RowsStep, row_tensors
from kimigraph.capture.shape import StepShape, step_shape
from kimigraph.capture.source import Loaded, ModelSource
from kimigraph.capture.weights import dtype_name, dtype_named, seed_weights
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.descriptors import ConvDescriptor, IndexKeyDescriptor, LatentDescriptor, StateDescriptor
from kimigraph.ir.errors import UsageError
from kimigraph.weights import layout_of, load_module


def transformers_source(
    directory: Path,
    document: dict[str, Any],
    config: CompileConfig,
    weight_seed: int | None,
    implementations: adapter.Implementations | None = None,
    rows: bool = False,
    with_hidden: bool = False,
) -> ModelSource:
    """The source of a transformers model. ``weight_seed`` seeds its weights; None reads them from ``directory``.

    ``rows``: a step over rows of their own length (``kimigraph.capture.rows``), not over a static cache.
    ``with_hidden``: such a step that also gives what the head reads, for a model with a multi-token-prediction layer.
    """
    document, model_config = configuration(directory, document, config, implementations)
    if with_hidden:
        require_head(model_config, str(directory / "config.json"))
    text = adapter.text_config(model_config)
    shape = step_shape(config, text.max_position_embeddings)
    dtype = dtype_named(config.dtype or dtype_name(model_config.dtype or text.dtype or torch.float32))
    tensors = adapter.new_cache(text, shape.batch, shape.context, dtype, False)[1]
    if rows:
        tensors = row_tensors(tensors)
        _check_rows(model_config, shape, tensors)
    inputs = step_inputs(text, shape, tensors, rows)
    headed = adapter.has_head(model_config)
    hints = CaptureHints(
        inputs={item.name: item.hint for item in inputs},
        outputs=("logits", "hidden_states") if with_hidden else (("logits",) if headed else ("hidden_states",)),
        prefix=adapter.PREFIX,
    )
    example = StepExample(shape, inputs, config.seed, partial(_settle_valid_flags, inputs))
    return ModelSource(
        name=directory.resolve().name,
        model_type=document["model_type"],
        phase=config.phase,
        load=partial(_load, directory, model_config, dtype, weight_seed, example, rows, with_hidden),
        shape=shape,
        inputs=inputs,
        hints=hints,
        document={
            **document,
            "dtype": dtype_name(dtype),
            **({"rows": True} if rows else {}),
            **({"with_hidden": True} if with_hidden else {}),
        },
        random_weights=weight_seed is not None,
        weight_seed=weight_seed,
        notes=shape.notes(getattr(text, "index_topk", 0)),
    )


def configuration(
    directory: Path,
    document: dict[str, Any],
    config: CompileConfig,
    implementations: adapter.Implementations | None = None,
) -> tuple[dict[str, Any], Any]:
    """``config.json`` with the overrides of ``config``, and transformers' object of it."""
    adapter.require_transformers(document["model_type"])
    known = adapter.known_fields(document["model_type"])
    document = apply_overrides(document, config.overrides, known, "text_config")
    model_config = adapter.read_config(document, str(directory / "config.json"))
    adapter.set_implementations(model_config, implementations or adapter.Implementations())
    return document, model_config


def _check_rows(model_config: Any, shape: StepShape, tensors: tuple[CacheTensor, ...]) -> None:
    if not adapter.has_head(model_config):
        raise UsageError(f"model_type {model_config.model_type!r} has no language head: it cannot generate tokens")
    if shape.batch > 1 and shape.tokens > 1 and any(item.role == "index_packed" for item in tensors):
        raise UsageError(
            f"--batch {shape.batch} with --tokens {shape.tokens}: rows of their own length take several tokens one row "
            f"at a time in model_type {model_config.model_type!r}, whose indexer pools keys: give one row (--batch 1, "
            "and for drafts --max-batch 1)"
        )


def _load(
    directory: Path,
    model_config: Any,
    dtype: torch.dtype,
    weight_seed: int | None,
    example: StepExample,
    rows: bool,
    with_hidden: bool,
    device: str,
) -> Loaded:
    model = adapter.empty_model(model_config, dtype, "meta" if device == "meta" else "cpu")
    shape, text = example.shape, adapter.text_config(model_config)
    if device == "cpu":
        if weight_seed is None:
            first = text.num_hidden_layers
            further = range(first, first + (getattr(text, "num_nextn_predict_layers", None) or 0))
            load_module(model, directory, layout_of(model_config.model_type).without_layers(further))
        else:
            seed_weights(model, weight_seed)
    has_state = shape.phase == "decode"
    cache, items = adapter.new_cache(text, shape.batch, shape.context, dtype, has_state)
    if rows:
        last_only = shape.phase != "verify"
        module = RowsStep(model, row_tensors(items), text.num_hidden_layers, shape.context, last_only, with_hidden)
    else:
        module = adapter.TransformersStep(model, cache, items)
    leading = ("input_ids", "lengths") if rows else ("input_ids",)

    def arguments(length: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = example.tensors(length)
        return (*(tensors.pop(name) for name in leading), tensors), {}

    return Loaded(module, arguments)


def step_inputs(text: Any, shape: StepShape, tensors: tuple[CacheTensor, ...], rows: bool) -> tuple[StepInput, ...]:
    """Tokens, lengths where rows have their own, and caches."""
    ids = InputHint("input", (0, text.vocab_size))
    inputs = [StepInput("input_ids", (shape.batch, shape.tokens), torch.int64, ids)]
    if rows:
        lengths = InputHint("input", (0, shape.default_length + 1), is_length=True)
        inputs.append(StepInput("lengths", (shape.batch,), torch.int32, lengths))
    caches = (StepInput(item.name, item.shape, item.dtype, _hint(item, text, shape)) for item in tensors)
    return *inputs, *caches


def _hint(item: CacheTensor, text: Any, shape: StepShape) -> InputHint:
    """Counters hold one value wherever they are seeded: the layers of a model must agree on it."""
    if item.role in ("length", "index_length"):
        length = shape.default_length
        return InputHint("cache", (length, length + 1), is_length=True)
    return InputHint("cache", descriptor=_descriptor(item, text))


def _descriptor(item: CacheTensor, text: Any) -> str:
    dtype = dtype_name(item.dtype)
    if item.role in ("latent", "rope"):
        return str(LatentDescriptor("contiguous", dtype, text.kv_lora_rank, text.qk_rope_head_dim))
    if item.role == "index_key":
        return str(IndexKeyDescriptor("contiguous", dtype, text.index_head_dim))
    if item.role == "kda":
        heads, width = text.linear_num_heads, text.linear_head_dim
        return str(StateDescriptor("kv", dtype, heads, width, width))
    if item.role == "conv":
        channels, columns = item.shape[1], item.shape[2]
        return str(ConvDescriptor(channels, text.linear_conv_kernel_dim, columns))
    return ""  # index_packed: keys, gate scores and valid flags in one row have no descriptor yet


def _settle_valid_flags(inputs: tuple[StepInput, ...], tensors: dict[str, Tensor], length: int) -> None:
    """A pooled indexer's cache ends in a flag that says which of its places hold a token."""
    for item in inputs:
        if item.name.endswith(".index_packed"):
            flags = tensors[item.name][..., -1]
            flags.zero_()
            flags[:, :length] = 1
