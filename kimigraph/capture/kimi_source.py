"""``kimi_k3`` and ``kimi_k31`` as sources."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from kimigraph.capture.example import StepExample, StepInput
from kimigraph.capture.hints import CaptureHints, InputHint
from kimigraph.capture.shape import StepShape, step_shape
from kimigraph.capture.source import Loaded, ModelSource
from kimigraph.capture.weights import NoRandomValues, dtype_name, seed_weights
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.descriptors import ConvDescriptor, IndexKeyDescriptor, LatentDescriptor, StateDescriptor
from kimigraph.models.kimi_k3 import KimiK3Config, KimiK3ForCausalLM
from kimigraph.models.kimi_k31 import KimiK31Config, KimiK31ForCausalLM, new_cache
from kimigraph.models.kimi_k31.configuration import KimiConfig
from kimigraph.models.kimi_k31.model import KimiForCausalLM
from kimigraph.weights import layout_of, load_module

MODEL_TYPES = ("kimi_k3", "kimi_k31")


def kimi_source(
    directory: Path, document: dict[str, Any], config: CompileConfig, weight_seed: int | None, last_only: bool = False
) -> ModelSource:
    """The source of a Kimi K3 or K3.1 model. ``weight_seed`` seeds its weights; None reads them from ``directory``.

    ``last_only``: logits of the last token of a step alone.
    """
    overrides = config.overrides + ((("dtype", config.dtype),) if config.dtype else ())
    model_config = read_model_config(document, overrides)
    shape = step_shape(config, model_config.max_position_embeddings)
    inputs = _inputs(model_config, shape)
    return ModelSource(
        name=directory.resolve().name,
        model_type=str(document["model_type"]),
        phase=config.phase,
        load=partial(_load, directory, model_config, weight_seed, StepExample(shape, inputs, config.seed), last_only),
        shape=shape,
        inputs=inputs,
        hints=CaptureHints({item.name: item.hint for item in inputs}, ("logits",)),
        document={
            **document,
            "overrides": [list(pair) for pair in overrides],
            "dtype": model_config.dtype,
            **({"last_only": True} if last_only else {}),
        },
        random_weights=weight_seed is not None,
        weight_seed=weight_seed,
        notes=shape.notes(model_config.index_topk if isinstance(model_config, KimiK31Config) else 0),
    )


def read_model_config(document: dict[str, Any], overrides: tuple[tuple[str, str], ...] = ()) -> KimiConfig:
    """The configuration of either model type; UsageError for what it cannot be."""
    kind = KimiK3Config if document["model_type"] == "kimi_k3" else KimiK31Config
    return kind.from_dict(document, overrides)


def empty_model(model_config: KimiConfig, device: str, last_only: bool = False) -> KimiForCausalLM:
    """The model of a configuration, its weights without values."""
    with NoRandomValues():
        if isinstance(model_config, KimiK31Config):
            return KimiK31ForCausalLM(model_config, device, last_only)
        assert isinstance(model_config, KimiK3Config)
        return KimiK3ForCausalLM(model_config, device, last_only)


def _load(
    directory: Path,
    model_config: KimiConfig,
    weight_seed: int | None,
    example: StepExample,
    last_only: bool,
    device: str,
) -> Loaded:
    module = empty_model(model_config, "meta" if device == "meta" else "cpu", last_only)
    if device == "cpu":
        if weight_seed is None:
            load_module(module, directory, layout_of("kimi_k31"))
        else:
            seed_weights(module, weight_seed)

    def arguments(length: int | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = example.tensors(length)
        return (tensors.pop("input_ids"), tensors.pop("lengths"), tensors), {}

    return Loaded(module, arguments)


def _inputs(model_config: KimiConfig, shape: StepShape) -> tuple[StepInput, ...]:
    longest = shape.default_length
    ids = InputHint("input", (0, model_config.vocab_size))
    lengths = InputHint("input", (0, longest + 1), is_length=True)
    caches = new_cache(model_config, shape.batch, shape.context, device="meta")
    return (
        StepInput("input_ids", (shape.batch, shape.tokens), torch.int64, ids),
        StepInput("lengths", (shape.batch,), torch.int32, lengths),
        *(
            StepInput(
                name,
                tuple(tensor.shape),
                tensor.dtype,
                InputHint("cache", descriptor=_descriptor(name, tensor, model_config)),
            )
            for name, tensor in caches.items()
        ),
    )


def _descriptor(name: str, tensor: torch.Tensor, model_config: KimiConfig) -> str:
    part, dtype, linear = name.rpartition(".")[2], dtype_name(tensor.dtype), model_config.linear_attn_config
    if part in ("latent", "rope"):
        return str(LatentDescriptor("contiguous", dtype, model_config.kv_lora_rank, model_config.qk_rope_head_dim))
    if part == "index_key":
        return str(IndexKeyDescriptor("contiguous", dtype, tensor.shape[-1]))
    if part == "kda":
        return str(StateDescriptor("vk", dtype, linear.num_heads, linear.head_dim, linear.head_dim))
    return str(ConvDescriptor(tensor.shape[1], linear.short_conv_kernel_size, tensor.shape[2]))
