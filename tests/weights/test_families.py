"""Checkpoints in the published layouts fill the models' own tensors."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from published import kimi, seeded_state, write
from safetensors.torch import load_file
from tiny_models import DEEPSEEK, GLM, GLM_TEXT, KIMI, write_model
from torch import Tensor, nn

from kimigraph.adapters import transformers_models as adapter
from kimigraph.capture import load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.models.kimi_k31 import KimiK31Config, KimiK31ForCausalLM
from kimigraph.weights import layout_of, load_module


def kimi_model() -> KimiK31ForCausalLM:
    model = KimiK31ForCausalLM(KimiK31Config.from_dict(KIMI))
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model


def assert_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    assert model.state_dict().keys() == state.keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, state[name].to(tensor.dtype), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("shards", [0, 3])
def test_kimi_k31_as_published(tmp_path: Path, shards: int) -> None:
    model = kimi_model()
    state = seeded_state(model)
    published = kimi(state)
    assert published["language_model.model.layers.0.self_attn.A_log"].shape == (8,)  # three heads and padding
    assert "language_model.model.layers.1.block_sparse_moe.experts.3.w2.weight" in published
    left_out = {"vision_tower.patch_embed.weight": torch.ones(2), "mm_projector.linear.weight": torch.ones(2, 2)}
    beyond = {"language_model.model.layers.2.eh_proj.weight": torch.ones(2)}  # a layer for further tokens
    load_module(model, write(tmp_path, {**published, **left_out, **beyond}, shards), layout_of("kimi_k31"))
    assert_state(model, state)


def test_kimi_k31_by_its_own_names_and_in_another_type(tmp_path: Path) -> None:
    model = kimi_model()
    state = {name: tensor.bfloat16() for name, tensor in seeded_state(model).items()}
    load_module(model, write(tmp_path, state), layout_of("kimi_k31"))
    assert_state(model, state)


def test_kimi_k3_as_published(tmp_path: Path) -> None:
    """The text part of the multimodal configuration, and its weights under the prefix of that model."""
    text = {name: value for name, value in KIMI.items() if not name.startswith("index_")} | {
        "model_type": "kimi_linear"
    }
    document = {"model_type": "kimi_k3", "text_config": text, "vision_config": {"patch_size": 14}}
    directory = Path(write_model(tmp_path, document, seed=None))
    state = {name: tensor for name, tensor in seeded_state(kimi_model()).items() if ".indexer." not in name}
    write(directory, {**kimi(state), "vision_tower.patch_embed.weight": torch.ones(2)}, 2)
    module = load_source(str(directory), CompileConfig(context=16)).build()[0]
    assert_state(module, state)


def test_layer_lists_count_from_1_and_checkpoints_from_0(tmp_path: Path) -> None:
    directory = Path(write_model(tmp_path, KIMI, seed=None))
    state = seeded_state(kimi_model())
    write(directory, kimi(state), 2)
    module = load_source(str(directory), CompileConfig(context=16)).build()[0]
    assert_state(module, state)
    assert "model.layers.0.self_attn.A_log" in state  # kda_layers is [1]
    swapped = {**KIMI["linear_attn_config"], "full_attn_layers": [1], "kda_layers": [2]}
    write_model(directory, {**KIMI, "linear_attn_config": swapped}, seed=None)
    with pytest.raises(UsageError, match=r"lacks .*model\.layers\.0\.self_attn\.q_a_proj\.weight.* has no use for"):
        load_source(str(directory), CompileConfig(context=16)).build()


@pytest.mark.parametrize("shape", [(1, 1, 3, 1), (3,), (128,)])
def test_a_log_in_all_its_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model = kimi_model()
    state = seeded_state(model)
    name = "model.layers.0.self_attn.A_log"
    stored = torch.zeros(shape)
    stored.view(-1)[:3] = state[name]
    load_module(model, write(tmp_path, {**state, name: stored}), layout_of("kimi_k31"))
    assert_state(model, state)


def test_padding_is_zero_or_the_heads_are_others(tmp_path: Path) -> None:
    model = kimi_model()
    state = {**seeded_state(model), "model.layers.0.self_attn.A_log": torch.ones(4)}
    with pytest.raises(UsageError, match=r"A_log has 4 values for the 3 of .*not the zeros of padding"):
        load_module(model, write(tmp_path, state), layout_of("kimi_k31"))


def test_fused_projections_are_taken_apart(tmp_path: Path) -> None:
    model = kimi_model()
    state = seeded_state(model)
    published = dict(state)
    for owner, fused, parts in (
        ("model.layers.0.self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("model.layers.1.self_attn", "fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa")),
        ("model.layers.0.mlp", "gate_up_proj", ("gate_proj", "up_proj")),
        ("model.layers.1.block_sparse_moe.shared_experts", "gate_up_proj", ("gate_proj", "up_proj")),
    ):
        rows = [published.pop(f"{owner}.{part}.weight") for part in parts]
        published[f"{owner}.{fused}.weight"] = torch.cat(rows)
    load_module(model, write(tmp_path, published, 2), layout_of("kimi_k31"))
    assert_state(model, state)


def kimi_linear() -> tuple[nn.Module, nn.Module]:
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    fields: dict[str, Any] = {key: KIMI[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    config = KimiLinearConfig(
        **fields,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["linear_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse"],
        linear_num_heads=3,
        linear_head_dim=8,
        kv_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        num_experts=4,
        num_experts_per_token=2,
        moe_intermediate_size=16,
        pad_token_id=0,
    )
    return KimiLinearForCausalLM(config).eval(), KimiLinearForCausalLM(config).eval()


def test_kimi_linear_as_transformers_publishes_it(tmp_path: Path) -> None:
    model, empty = kimi_linear()
    model.load_state_dict(seeded_state(model))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    names = {name for path in tmp_path.glob("model-*.safetensors") for name in load_file(path)}
    assert "model.layers.1.block_sparse_moe.experts.3.w1.weight" in names
    assert {"model.layers.0.self_attn.A_log", "model.layers.0.self_attn.k_conv1d.weight"} <= names
    load_module(empty, tmp_path, layout_of("kimi_linear"))
    assert_state(empty, model.state_dict())
    ids = torch.arange(6).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(empty(ids).logits, model(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("document", [DEEPSEEK, GLM, GLM_TEXT], ids=lambda document: document["model_type"])
def test_what_save_pretrained_writes(tmp_path: Path, document: dict[str, Any], tied: bool) -> None:
    config = adapter.read_config({**document, "tie_word_embeddings": tied}, "config.json")
    adapter.set_implementations(config, adapter.Implementations())
    model, empty = (adapter.empty_model(config, torch.bfloat16, "cpu") for _ in range(2))
    state = seeded_state(model)
    if tied and "lm_head.weight" in state:
        assert empty.get_parameter("lm_head.weight") is empty.get_parameter(model_embedding(empty))
        state["lm_head.weight"] = state[model_embedding(model)]
    model.load_state_dict(state)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    load_module(empty, tmp_path, layout_of(config.model_type))
    assert_state(empty, state)


def model_embedding(model: nn.Module) -> str:
    return next(name for name in model.state_dict() if name.endswith("embed_tokens.weight"))


def test_a_deepseek_directory_compiles_from_save_pretrained(tmp_path: Path) -> None:
    """The source that capture builds is transformers' own model."""
    from transformers import DeepseekV32ForCausalLM

    config = adapter.read_config(DEEPSEEK, "config.json")
    model = DeepseekV32ForCausalLM(config).eval()
    model.load_state_dict(seeded_state(model))
    model.save_pretrained(tmp_path)
    source = load_source(str(tmp_path), CompileConfig(phase="prefill", context=9))
    module, args, _ = source.build()
    with torch.no_grad():
        torch.testing.assert_close(module(*args), model(args[0]).logits, rtol=1e-4, atol=1e-4)


def test_a_tied_weight_under_either_name(tmp_path: Path) -> None:
    config = adapter.read_config({**DEEPSEEK, "tie_word_embeddings": True}, "config.json")
    model = adapter.empty_model(config, torch.float32, "cpu")
    state = seeded_state(model)
    shared = state["lm_head.weight"] = state["model.embed_tokens.weight"]
    for absent in ("lm_head.weight", "model.embed_tokens.weight", ""):
        shown = {name: tensor for name, tensor in state.items() if name != absent}
        model.lm_head.weight.data.zero_()
        load_module(model, write(tmp_path / absent, shown), layout_of("deepseek_v32"))
        torch.testing.assert_close(model.lm_head.weight, shared, rtol=0, atol=0)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    other = {**state, "lm_head.weight": shared + 1}
    with pytest.raises(UsageError, match=re.escape("lm_head.weight differs from model.embed_tokens.weight")):
        load_module(model, write(tmp_path / "other", other), layout_of("deepseek_v32"))
