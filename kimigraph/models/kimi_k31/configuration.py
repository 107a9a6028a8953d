"""The configuration of a Kimi K3.1 model: the fields of its ``config.json``, checked."""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import torch

from kimigraph.ir.errors import UsageError

IGNORED_FIELDS = frozenset(
    "architectures auto_map initializer_range kv_cache_dtype quantization_config transformers_version use_cache".split()
)
"""Bookkeeping fields that published configurations carry and that do not change the computation."""


@dataclass(frozen=True)
class LinearAttentionConfig:
    """The KDA layers. Layer numbers are 1-based, as published; numbers beyond ``num_hidden_layers`` are not used."""

    full_attn_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = -5.0


@dataclass(frozen=True)
class KimiK31Config:
    """Fields of ``config.json``, under their published names; defaults are those of Kimi K3.

    ``from_dict`` builds and checks one. ``dtype`` is that of weights and caches; a few parameters are always fp32.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    linear_attn_config: LinearAttentionConfig
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    attn_res_block_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    model_type: Literal["kimi_k31"] = "kimi_k31"
    mla_use_nope: Literal[True] = True
    mla_use_output_gate: bool = True
    index_rope: Literal["none", "half_split", "interleaved"] = "none"
    rope_theta: float = 10000.0
    first_k_dense_replace: int = 1
    num_shared_experts: int = 1
    latent_moe_use_norm: bool = True
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    hidden_act: Literal["situ"] = "situ"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    tie_word_embeddings: Literal[False] = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    random_weights: dict[str, Any] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], overrides: Iterable[tuple[str, str]] = ()) -> "KimiK31Config":
        """The configuration of that JSON object, with (FIELD, VALUE) texts set over it.

        A value is read as JSON, else as plain text; ``linear_attn_config.head_dim`` reaches the nested field. Raises
        UsageError for an unknown or missing field, a value of the wrong type and values that do not fit each other.
        """
        merged: dict[str, Any] = json.loads(json.dumps(dict(data)))
        for path, text in overrides:
            _override(merged, path, text)
        merged.setdefault("dtype", merged.pop("torch_dtype", None) or "float32")
        config = cast(KimiK31Config, _build(cls, merged, ""))
        _check_layers(config)
        _check_sizes(config)
        return config

    @classmethod
    def from_file(cls, path: Path, overrides: Iterable[tuple[str, str]] = ()) -> "KimiK31Config":
        """The configuration in that JSON file; errors as in ``from_dict``."""
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: cannot be read as JSON ({error}); give a model's config.json") from error
        if not isinstance(data, dict):
            raise UsageError(f"{path}: holds a JSON {type(data).__name__}; a model's config.json holds an object")
        return cls.from_dict(cast(dict[str, Any], data), overrides)

    @property
    def dsa_layers(self) -> tuple[int, ...]:
        """The 0-based decoder layers with sparse MLA attention."""
        listed = self.linear_attn_config.full_attn_layers
        return tuple(sorted(layer - 1 for layer in listed if layer <= self.num_hidden_layers))

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """The 0-based decoder layers with Kimi Delta Attention."""
        listed = self.linear_attn_config.kda_layers
        return tuple(sorted(layer - 1 for layer in listed if layer <= self.num_hidden_layers))

    @property
    def qk_head_dim(self) -> int:
        """Width of an un-absorbed MLA query; its inverse root is the softmax scale."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch names it."""
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]


def _override(data: dict[str, Any], path: str, text: str) -> None:
    *parents, leaf = path.split(".")
    for parent in parents:
        inner = data.get(parent)
        if not isinstance(inner, dict):
            raise UsageError(f"--set {path}={text}: the configuration has no object {parent!r}")
        data = cast(dict[str, Any], inner)
    try:
        data[leaf] = json.loads(text)
    except ValueError:
        data[leaf] = text


def _build(cls: type[Any], data: Mapping[str, Any], place: str) -> Any:
    """An instance of the dataclass from a JSON object; ``place`` prefixes field names in messages."""
    hints = get_type_hints(cls)
    for name in data:
        if name not in hints and name not in IGNORED_FIELDS:
            close = difflib.get_close_matches(name, hints, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "remove it, or use a model type that has it"
            raise UsageError(f"config.json: kimi_k31 has no field {place + name!r}; {hint}")
    missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in data]
    if missing:
        raise UsageError(f"config.json: field {place + missing[0]!r} is missing; kimi_k31 has no default for it")
    return cls(**{name: _convert(data[name], hints[name], place + name) for name in hints if name in data})


def _convert(value: Any, hint: Any, place: str) -> Any:
    """The JSON value as the annotated type, or UsageError."""
    origin, choices = get_origin(hint), get_args(hint)
    if hint is LinearAttentionConfig and isinstance(value, dict):
        return _build(LinearAttentionConfig, cast(dict[str, Any], value), f"{place}.")
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        raise UsageError(f"config.json: {place} is {value!r}; supported: {', '.join(map(repr, choices))}")
    if origin in (Union, UnionType):
        return None if value is None else _convert(value, choices[0], place)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(item, int, place) for item in cast(list[Any], value))
    if origin is dict and isinstance(value, dict):
        return cast(dict[str, Any], value)
    if hint is float and type(value) in (int, float):
        return float(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    wanted = "an object" if origin is dict or hint is LinearAttentionConfig else getattr(hint, "__name__", str(hint))
    raise UsageError(f"config.json: {place} is {value!r}; it takes {'a list of int' if origin is tuple else wanted}")


def _check_layers(config: KimiK31Config) -> None:
    linear = config.linear_attn_config
    listed = sorted(linear.full_attn_layers + linear.kda_layers)
    for layer in range(1, config.num_hidden_layers + 1):
        if listed.count(layer) != 1:
            raise UsageError(
                f"config.json: layer {layer} is named {listed.count(layer)} times in linear_attn_config; name each of"
                f" the {config.num_hidden_layers} layers (1-based) once, in kda_layers or in full_attn_layers"
            )
    if listed and listed[0] < 1:
        raise UsageError(f"config.json: linear_attn_config names layer {listed[0]}; layers are numbered from 1")
    bound = linear.gate_lower_bound
    if bound is not None and not -5.0 <= bound < 0.0:
        raise UsageError(f"config.json: linear_attn_config.gate_lower_bound is {bound}; it lies in [-5, 0), or is null")


def _check_sizes(config: KimiK31Config) -> None:
    zero_allowed = ("first_k_dense_replace", "num_shared_experts", "pad_token_id", "bos_token_id", "eos_token_id")
    for owner, place in ((config, ""), (config.linear_attn_config, "linear_attn_config.")):
        for name, value in vars(owner).items():
            if type(value) is int and value < (0 if name in zero_allowed else 1):
                raise UsageError(f"config.json: {place}{name} is {value}; it must be positive")
    if config.num_experts_per_token > config.num_experts:
        raise UsageError(
            f"config.json: num_experts_per_token is {config.num_experts_per_token} of {config.num_experts} experts"
        )
    rotated = config.qk_rope_head_dim
    if config.index_rope != "none" and (rotated % 2 or rotated > config.index_head_dim):
        raise UsageError(
            f"config.json: index_rope {config.index_rope!r} rotates the first qk_rope_head_dim = {rotated} of"
            f" index_head_dim = {config.index_head_dim} dims; that number must be even and not larger"
        )
