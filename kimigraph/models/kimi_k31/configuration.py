"""The configurations of Kimi K3 and K3.1: the fields of their ``config.json``, checked."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch

from kimigraph.ir.errors import UsageError
from kimigraph.models.kimi_k31.fields import FieldReader, override

IGNORED_FIELDS = frozenset(
    "architectures auto_map initializer_range kv_cache_dtype quantization_config transformers_version use_cache".split()
)
"""Bookkeeping fields that published configurations carry and that do not change the computation."""
IGNORED_IN_K3 = IGNORED_FIELDS.union(
    # Defaults that transformers of its day wrote into every configuration: they concern text generation, training
    # and other kinds of model. Positions and head_dim are not used by layers without rotary positions.
    "add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size"
    " decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size"
    " exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder"
    " is_encoder_decoder label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams"
    " num_return_sequences output_attentions output_hidden_states output_scores prefix problem_type pruned_heads"
    " remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens"
    " task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript"
    " typical_p use_bfloat16 head_dim rope_theta rope_parameters use_grouped_topk".split()
)


@dataclass(frozen=True)
class LinearAttentionConfig:
    """The KDA layers. Layer numbers are 1-based, as published; numbers beyond ``num_hidden_layers`` are not used."""

    full_attn_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]
    num_heads: int
    head_dim: int
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = -5.0
    use_full_rank_gate: Literal[True] = True


@dataclass(frozen=True, kw_only=True)
class KimiConfig:
    """The fields that K3 and K3.1 share, under their published names; defaults are those of Kimi K3.

    ``from_dict`` of one of the two builds and checks it. ``dtype`` is that of weights and caches; a few parameters are
    always fp32.
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
    attn_res_block_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int
    num_key_value_heads: int | None = None
    mla_use_nope: Literal[True] = True
    mla_use_output_gate: bool = True
    first_k_dense_replace: int = 1
    moe_layer_freq: Literal[1] = 1
    num_shared_experts: int = 1
    latent_moe_use_norm: bool = True
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    num_expert_group: Literal[1] = 1
    topk_group: Literal[1] = 1
    hidden_act: Literal["situ"] = "situ"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: Literal[False] = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    random_weights: dict[str, Any] | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    @classmethod
    def reader(cls) -> FieldReader:
        """What reads the fields of this model type."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], overrides: Iterable[tuple[str, str]] = ()) -> Self:
        """The configuration of that JSON object, with (FIELD, VALUE) texts set over it.

        A value is read as JSON, else as plain text; ``linear_attn_config.head_dim`` reaches the nested field. Raises
        UsageError for an unknown or missing field, a value of the wrong type and values that do not fit each other.
        """
        merged: dict[str, Any] = json.loads(json.dumps(dict(data)))
        for path, text in overrides:
            override(merged, path, text)
        merged.setdefault("dtype", merged.pop("torch_dtype", None) or "float32")
        config = cast(Self, cls.reader().build(cls, merged))
        _check_layers(config)
        config.check_sizes()
        return config

    @classmethod
    def from_file(cls, path: Path, overrides: Iterable[tuple[str, str]] = ()) -> Self:
        """The configuration in that JSON file; errors as in ``from_dict``."""
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: cannot be read as JSON ({error}); give a model's config.json") from error
        if not isinstance(data, dict):
            raise UsageError(f"{path}: holds a JSON {type(data).__name__}; a model's config.json holds an object")
        return cls.from_dict(cast(dict[str, Any], data), overrides)

    @property
    def latent_layers(self) -> tuple[int, ...]:
        """The 0-based decoder layers with MLA attention."""
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

    def check_sizes(self) -> None:
        """UsageError for sizes that no model has, or that do not fit each other."""
        zero_allowed = (
            "first_k_dense_replace num_shared_experts pad_token_id bos_token_id eos_token_id num_nextn_predict_layers"
        ).split()
        for owner, place in ((self, ""), (self.linear_attn_config, "linear_attn_config.")):
            for name, value in vars(owner).items():
                if type(value) is int and value < (0 if name in zero_allowed else 1):
                    raise UsageError(f"config.json: {place}{name} is {value}; it must be positive")
        if self.num_experts_per_token > self.num_experts:
            raise UsageError(
                f"config.json: num_experts_per_token is {self.num_experts_per_token} of {self.num_experts} experts"
            )
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise UsageError(
                f"config.json: num_key_value_heads is {self.num_key_value_heads} and num_attention_heads "
                f"{self.num_attention_heads}; in latent attention every head has keys of its own, so they are equal"
            )


@dataclass(frozen=True, kw_only=True)
class KimiK3Config(KimiConfig):
    """Kimi K3: every MLA layer attends to all tokens.

    The published file describes a model of texts and images; its ``text_config``, of model type ``kimi_linear``, is
    what ``from_dict`` takes out of it. Overrides name fields of that part.
    """

    model_type: Literal["kimi_k3"] = "kimi_k3"

    @classmethod
    def reader(cls) -> FieldReader:
        """What reads the fields of this model type."""
        return FieldReader("kimi_k3", IGNORED_IN_K3)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], overrides: Iterable[tuple[str, str]] = ()) -> Self:
        """The configuration of that JSON object, or of its ``text_config``; see the class and ``KimiConfig``."""
        text = data.get("text_config")
        if isinstance(text, dict):
            outer = {name: data[name] for name in ("random_weights", "dtype", "torch_dtype") if name in data}
            data = {**outer, **cast(dict[str, Any], text), "model_type": data.get("model_type", "kimi_k3")}
        return super().from_dict(data, overrides)


@dataclass(frozen=True, kw_only=True)
class KimiK31Config(KimiConfig):
    """Kimi K3.1: the MLA layers attend to what a Lightning Indexer picks."""

    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_rope: Literal["none", "half_split", "interleaved"] = "none"
    rope_theta: float = 10000.0
    model_type: Literal["kimi_k31"] = "kimi_k31"

    @classmethod
    def reader(cls) -> FieldReader:
        """What reads the fields of this model type."""
        return FieldReader("kimi_k31", IGNORED_FIELDS)

    @property
    def dsa_layers(self) -> tuple[int, ...]:
        """The 0-based decoder layers with sparse MLA attention: all that have MLA."""
        return self.latent_layers

    def check_sizes(self) -> None:
        """UsageError for sizes that no model has, or that do not fit each other."""
        super().check_sizes()
        rotated = self.qk_rope_head_dim
        if self.index_rope != "none" and (rotated % 2 or rotated > self.index_head_dim):
            raise UsageError(
                f"config.json: index_rope {self.index_rope!r} rotates the first qk_rope_head_dim = {rotated} of"
                f" index_head_dim = {self.index_head_dim} dims; that number must be even and not larger"
            )


def _check_layers(config: KimiConfig) -> None:
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
