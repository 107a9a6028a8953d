import pytest
import torch
from safetensors.torch import save_file

from kimigraph.ir.errors import UsageError
from kimigraph.ir.seeded import seeded_tensor
from kimigraph.models.kimi_k31 import KimiK31ForCausalLM, initialize, load_weights


def halves(model, directory):
    """The model's weights in two files."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, directory / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, directory / "model-2.safetensors")


def test_seeded_weights_follow_from_name_and_seed(configure):
    model = initialize(KimiK31ForCausalLM(configure(dtype="bfloat16"), device="meta"), seed=7)
    parameters = dict(model.named_parameters())
    for name in (
        "lm_head.weight",
        "model.layers.2.self_attn.A_log",
        "model.layers.1.block_sparse_moe.experts.down_proj",
    ):
        got = parameters[name]
        assert torch.equal(got, seeded_tensor(name, tuple(got.shape), got.dtype, kind="weight", seed=7))
        assert not torch.equal(got, seeded_tensor(name, tuple(got.shape), got.dtype, kind="weight", seed=8))


def test_no_seeded_parameter_is_constant_and_experts_keep_their_scale(build):
    model = build()
    assert all(parameter.std() > 0 for parameter in model.parameters())
    experts = model.model.layers[1].block_sparse_moe.experts
    assert experts.gate_up_proj.std() == pytest.approx(32**-0.5, rel=0.05)


def test_saved_weights_come_back(build, configure, tmp_path):
    model = build()
    halves(model, tmp_path)
    loaded = load_weights(KimiK31ForCausalLM(configure(), device="meta"), tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    narrow = load_weights(KimiK31ForCausalLM(configure(dtype="bfloat16"), device="meta"), tmp_path)
    assert narrow.lm_head.weight.dtype == torch.bfloat16
    assert not any(parameter.requires_grad for parameter in narrow.parameters())


def test_a_directory_without_weights(configure, tmp_path):
    with pytest.raises(UsageError, match=r"holds no \*\.safetensors files"):
        load_weights(KimiK31ForCausalLM(configure(), device="meta"), tmp_path)


def test_weights_that_do_not_fit_are_named(build, configure, tmp_path):
    halves(build(), tmp_path)
    with pytest.raises(UsageError, match="the configuration asks for"):
        load_weights(KimiK31ForCausalLM(configure(vocab_size=300), device="meta"), tmp_path)
    with pytest.raises(UsageError, match="is no parameter of this model"):
        load_weights(KimiK31ForCausalLM(configure(num_shared_experts=0), device="meta"), tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(UsageError, match="parameters have no tensor"):
        load_weights(KimiK31ForCausalLM(configure(), device="meta"), tmp_path)
