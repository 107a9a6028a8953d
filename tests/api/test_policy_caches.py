"""A policy in the Python API: caches of its formats, steps on them, and calls with other caches."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kimigraph
from kimigraph.capture import load_source
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError

SOURCE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
SHAPE = CompileConfig(
    target="cpu:reference", batch=2, context=32, cache="off", report=False, overrides=(("num_hidden_layers", "4"),)
)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    module, args, _ = load_source(SOURCE, SHAPE).build(0)
    return module, args


def compiled(model, policy="article", **more):
    module, args = model
    config = CompileConfig(target="cpu:reference", cache="off", report=False, policy=policy, **more)
    return kimigraph.optimize(module, args, config)


def test_steps_on_caches_of_the_policy(model):
    module, args = model
    program = compiled(model)
    caches = program.new_caches()
    assert caches["cache.3.latent"].dtype == caches["cache.3.index_key"].dtype == torch.uint8
    assert caches["cache.3.latent"].shape == (2, 32, 68) and "cache.3.rope" not in caches
    assert [spec.source for spec in program.cache_spec] == list(caches)
    plain = {name: torch.zeros_like(tensor) for name, tensor in args[2].items()}
    for step in range(3):  # up to 16 tokens all are picked
        ids, lengths = torch.full((2, 1), 7 + step), torch.full((2,), step, dtype=torch.int32)
        got, want = program(ids, lengths, caches), module(ids, lengths, plain)
        assert (got - want).norm() / want.norm() < 0.1
    assert caches["cache.3.latent"][:, :3].any() and not caches["cache.3.latent"][:, 3:].any()
    report = program.report()
    assert report.memory["cache_bytes_per_token"] == 101 and report.memory["cache_bytes_per_token_bf16"] == 160
    assert {"node", "format", "group", "reason"} <= report.quantization[0].keys()
    assert "became index_key{" in program.explain("insert-quantization")


def test_other_caches_are_a_type_error_that_names_both_formats(model, tmp_path):
    module, args = model
    program = compiled(model)
    plain = {name: torch.zeros_like(tensor) for name, tensor in args[2].items()}
    message = r"cache.3.latent is latent\{.*float8_e4m3fn.*in the model latent\{.*float32.*new_caches"
    with pytest.raises(TypeError, match=message):
        program(args[0], args[1], plain)
    other = compiled(model, "deepseek").new_caches()
    with pytest.raises(TypeError, match=message):
        program(args[0], args[1], other)
    loaded = kimigraph.load(program.save(tmp_path / "saved"), module.state_dict())
    with pytest.raises(TypeError, match=message):
        loaded(args[0], args[1], plain)
    caches = loaded.new_caches()
    assert loaded(args[0], args[1], caches).shape == module(args[0], args[1], plain).shape


@pytest.mark.parametrize("policy", ["article", "deepseek"])
def test_a_quantised_program_verifies(policy, tmp_path):
    config = replace(SHAPE, policy=policy, verify=True, check_numerics=True)
    [report] = compile_source(SOURCE, [config], tmp_path / "artifact", print)
    assert report.verify["passed"] and report.verify["tolerance"] == 1e-4
    rows = {row["pass"]: row for row in report.numerics}
    assert rows["insert-quantization"]["modified"] and all(row["passed"] for row in rows.values())


@pytest.mark.parametrize(
    "more", [{"phase": "prefill", "batch": 1}, pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow)]
)
def test_prefill_and_16_bits_verify(more, tmp_path):
    config = replace(SHAPE, policy="article", verify=True, **more)
    [report] = compile_source(SOURCE, [config], tmp_path / "artifact", print)
    assert report.verify["passed"] and report.verify["tolerance"] == pytest.approx(
        1e-4 if "phase" in more else 0.1, rel=0.2
    )


def test_a_pipeline_without_the_pass_cannot_follow_a_policy(model):
    for more in ({"opt_level": 0}, {"disabled_passes": ("insert-quantization",)}):
        with pytest.raises(UsageError, match="policy 'article' needs the pass insert-quantization"):
            compiled(model, **more)
    with pytest.raises(UsageError, match="did you mean 'article'"):
        compiled(model, "artcle")
