from pathlib import Path

import pytest
import torch

from kimigraph.ir.errors import UsageError
from kimigraph.models.kimi_k31 import KimiK31Config, KimiK31ForCausalLM, new_cache

K31 = Path(__file__).parents[2] / "examples" / "k31" / "config.json"


def test_k31_has_the_published_size():
    config = KimiK31Config.from_file(K31)
    model = KimiK31ForCausalLM(config, device="meta")
    assert config.dsa_layers == (3, 7)
    assert config.kda_layers == (0, 1, 2, 4, 5, 6)
    assert sum(parameter.numel() for parameter in model.parameters()) == 7_641_016_128
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in model.parameters())


def test_k31_caches_have_the_published_shapes():
    config = KimiK31Config.from_file(K31)
    cache = new_cache(config, batch=2, context=256, device="meta")
    assert {name: tuple(cache[name].shape) for name in cache if ".3." in name or ".4." in name} == {
        "cache.3.latent": (2, 256, 512),
        "cache.3.rope": (2, 256, 64),
        "cache.3.index_key": (2, 256, 128),
        "state.4.kda": (2, 32, 128, 128),
        "state.4.conv": (2, 3 * 32 * 128, 3),
    }
    assert cache["state.4.kda"].dtype == torch.float32
    assert cache["state.4.conv"].dtype == cache["cache.3.rope"].dtype == torch.bfloat16


def test_fewer_layers_leave_the_rest_of_the_lists_unused(tiny):
    config = KimiK31Config.from_dict(tiny, [("num_hidden_layers", "4")])
    assert (config.kda_layers, config.dsa_layers) == ((0, 1, 2), (3,))


def test_overrides_are_json_or_text_and_reach_nested_fields(tiny):
    overrides = [
        ("index_rope", "half_split"),
        ("rms_norm_eps", "1e-6"),
        ("linear_attn_config.gate_lower_bound", "null"),
    ]
    config = KimiK31Config.from_dict(tiny, overrides)
    assert (config.index_rope, config.rms_norm_eps) == ("half_split", 1e-6)
    assert config.linear_attn_config.gate_lower_bound is None
    assert tiny["index_rope"] == "none"
    assert tiny["linear_attn_config"]["gate_lower_bound"] == -5.0


def test_bookkeeping_fields_are_ignored_and_torch_dtype_is_dtype(tiny):
    fields = {name: value for name, value in tiny.items() if name != "dtype"}
    config = KimiK31Config.from_dict(fields | {"architectures": ["X"], "torch_dtype": "bfloat16"})
    assert config.torch_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("index_top_k", "8", "no field 'index_top_k'; did you mean 'index_topk'"),
        ("linear_attn_config.heads", "8", "no field 'linear_attn_config.heads'"),
        ("nested.field", "1", "no object 'nested'"),
        ("hidden_size", "64.5", "hidden_size is 64.5; it takes int"),
        ("hidden_size", "wide", "hidden_size is 'wide'; it takes int"),
        ("vocab_size", "0", "vocab_size is 0; it must be positive"),
        ("linear_attn_config", "[]", "linear_attn_config is []; it takes an object"),
        ("linear_attn_config.head_dim", "-1", "linear_attn_config.head_dim is -1"),
        ("linear_attn_config.gate_lower_bound", "-6", "gate_lower_bound is -6.0; it lies in [-5, 0)"),
        ("linear_attn_config.kda_layers", "[1, 2, 5, 6, 7]", "layer 3 is named 0 times"),
        ("linear_attn_config.full_attn_layers", "[3, 4, 8]", "layer 3 is named 2 times"),
        ("linear_attn_config.full_attn_layers", "[0, 4, 8]", "numbered from 1"),
        ("num_hidden_layers", "9", "layer 9 is named 0 times"),
        ("index_rope", "neox", "index_rope is 'neox'; supported: 'none', 'half_split', 'interleaved'"),
        ("hidden_act", "silu", "hidden_act is 'silu'; supported: 'situ'"),
        ("mla_use_nope", "false", "mla_use_nope is False; supported: True"),
        ("num_expert_group", "8", "num_expert_group is 8; supported: 1"),
        ("num_experts_per_token", "9", "num_experts_per_token is 9 of 8 experts"),
        ("dtype", "float16", "dtype is 'float16'; supported: 'float32', 'bfloat16'"),
        ("model_type", "kimi_k3", "model_type is 'kimi_k3'; supported: 'kimi_k31'"),
    ],
)
def test_a_field_that_does_not_fit_is_named(tiny, field, value, message):
    with pytest.raises(UsageError) as caught:
        KimiK31Config.from_dict(tiny, [(field, value)])
    assert message in str(caught.value)


def test_rotated_index_dims_must_be_even_and_fit(tiny):
    with pytest.raises(UsageError, match="must be even and not larger"):
        KimiK31Config.from_dict(tiny | {"index_rope": "half_split", "qk_rope_head_dim": 64})
    with pytest.raises(UsageError, match="must be even and not larger"):
        KimiK31Config.from_dict(tiny | {"index_rope": "interleaved", "qk_rope_head_dim": 7})


def test_a_missing_field_is_named(tiny):
    fields = {name: value for name, value in tiny.items() if name != "index_topk"}
    with pytest.raises(UsageError, match="field 'index_topk' is missing"):
        KimiK31Config.from_dict(fields)


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_a_file_that_is_no_configuration_is_named(tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        KimiK31Config.from_file(path)
