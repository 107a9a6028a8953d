import pytest
import torch

from kimigraph.ir.seeded import seeded_tensor
from kimigraph.models.kimi_k31 import KimiK31ForCausalLM, initialize


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


def test_a_model_built_in_memory_gets_the_same_weights(configure):
    built = initialize(KimiK31ForCausalLM(configure()), seed=1)
    for name, tensor in initialize(KimiK31ForCausalLM(configure(), device="meta"), seed=1).state_dict().items():
        assert torch.equal(built.state_dict()[name], tensor)
        assert not tensor.requires_grad


def test_no_seeded_parameter_is_constant_and_experts_keep_their_scale(build):
    model = build()
    assert all(parameter.std() > 0 for parameter in model.parameters())
    experts = model.model.layers[1].block_sparse_moe.experts
    assert experts.gate_up_proj.std() == pytest.approx(32**-0.5, rel=0.05)
