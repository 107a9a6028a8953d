"""SOURCE: what it may be, and what is said when it may not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import DEEPSEEK, GLM, KIMI, write_model

from kimigraph.capture import capture, load_source
from kimigraph.capture.overrides import apply_overrides
from kimigraph.capture.program import tensors_of
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.seeded import seeded_tensor

CONFIG = CompileConfig(context=16)


def refused(source: str, config: CompileConfig = CONFIG) -> str:
    with pytest.raises(UsageError) as caught:
        load_source(source, config).build()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    assert re.search(r"nowhere does not exist: give a directory", refused(str(tmp_path / "nowhere")))
    assert re.search(r"has no config\.json", refused(str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    assert re.search(r"config\.json is no JSON", refused(str(tmp_path)))
    assert re.search(r"is a file: give a .onnx or .pt2 file, the directory", refused(str(tmp_path / "config.json")))
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert re.search(r"names no model_type", refused(str(tmp_path)))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    known = r"'gpt2' is not known; known are kimi_k3, kimi_k31, kimi_linear, deepseek_v32"
    assert re.search(known, refused(str(tmp_path)))


@pytest.mark.parametrize("document", [KIMI, DEEPSEEK, GLM], ids=lambda document: document["model_type"])
def test_missing_weights_name_the_option(tmp_path: Path, document: dict[str, Any]) -> None:
    source = write_model(tmp_path, document, seed=None)
    assert re.search(r"has no \*\.safetensors files.*--random-weights", refused(source))
    assert load_source(source, CompileConfig(context=16, random_weights=True)).random_weights


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "--batch 0 is not a shape"),
        ({"tokens": 0}, "--tokens 0 is not a shape"),
        ({"context": -1}, "--context -1 is not a shape"),
        ({"context": 4, "tokens": 5}, "--tokens 5 does not fit into --context 4"),
        ({"context": 300}, "--context 300 is more than the model's max_position_embeddings 256"),
        ({"dtype": "int8"}, "int8"),
        ({"overrides": (("index_topc", "4"),)}, "did you mean 'index_topk'"),
        ({"overrides": (("num_hidden_layers", '"two"'),)}, "num_hidden_layers"),
    ],
)
@pytest.mark.parametrize("document", [KIMI, DEEPSEEK, GLM], ids=lambda document: document["model_type"])
def test_shapes_and_fields_that_cannot_be(
    tmp_path: Path, document: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    assert message in refused(write_model(tmp_path, document), CompileConfig(**{"context": 16, **options}))


def test_lengths_that_do_not_fit(tmp_path: Path) -> None:
    source = load_source(write_model(tmp_path, DEEPSEEK), CONFIG)
    with pytest.raises(
        UsageError, match="length 16 leaves no room for 1 new tokens in a context of 16: choose 0 to 15"
    ):
        source.build(16)


def test_default_shapes(tmp_path: Path) -> None:
    source = write_model(tmp_path, DEEPSEEK)
    assert load_source(source, CompileConfig()).shape_key == "decode-b1-t1-c256"
    assert load_source(source, CompileConfig(phase="prefill", context=9)).shape_key == "prefill-b1-t9-c9"


@pytest.mark.parametrize("document", [KIMI, DEEPSEEK, GLM], ids=lambda document: document["model_type"])
def test_weights_are_seeded_by_name(tmp_path: Path, document: dict[str, Any]) -> None:
    source = load_source(write_model(tmp_path, document, seed=5), CONFIG)
    module = source.build()[0]
    state = {name.removeprefix(source.hints.prefix): tensor for name, tensor in module.state_dict().items()}
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, seeded_tensor(name, tensor.shape, tensor.dtype, "weight", 5), rtol=0, atol=0)


def test_overrides_reach_the_text_part_and_refit_layer_lists(tmp_path: Path) -> None:
    config = CompileConfig(context=16, overrides=(("num_hidden_layers", "3"), ("text_config.index_topk", "4")))
    source = load_source(write_model(tmp_path, GLM), config)
    text = source.document["text_config"]
    assert text["layer_types"] == ["linear_attention", "indexed_attention", "linear_attention"]
    names = source.build()[1][1]
    assert "state.2.kda" in names and text["index_topk"] == 4


def test_numbers_of_layers_that_are_no_more_are_cut() -> None:
    """As published, from 1; transformers takes a number behind the last layer for an error."""
    numbers = {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]}
    document = {"num_hidden_layers": 8, "linear_attn_config": numbers}
    changed = apply_overrides(document, (("num_hidden_layers", "4"),), set())
    assert changed["linear_attn_config"] == {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    assert numbers["full_attn_layers"] == [4, 8]


@pytest.mark.parametrize("document", [KIMI, DEEPSEEK, GLM], ids=lambda document: document["model_type"])
def test_weights_from_files(tmp_path: Path, document: dict[str, Any]) -> None:
    """A checkpoint is used as it is; a missing or misshapen tensor is named."""
    seeded = load_source(write_model(tmp_path / "seeded", document, seed=7), CONFIG)
    module = seeded.build()[0]
    state = {name.removeprefix(seeded.hints.prefix): t.clone() for name, t in module.state_dict().items()}
    directory = Path(write_model(tmp_path / "files", document, seed=None))
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    source = load_source(str(directory), CONFIG)
    assert not source.random_weights
    loaded, args, _ = source.build()
    torch.testing.assert_close(loaded(*args), module(*seeded.build()[1]), rtol=0, atol=0)
    del state["lm_head.weight"]
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    assert re.search(r"lacks 1 weight: lm_head\.weight\..*--random-weights", refused(str(directory)))
    save_file({**state, "lm_head.weight": torch.zeros(3, 3)}, directory / "model.safetensors", {"format": "pt"})
    assert re.search(r"lm_head\.weight is \(3, 3\), the configuration asks for \(96, 32\)", refused(str(directory)))


def test_function_gives_module_and_inputs() -> None:
    for name in ("running_sum", "running_sum_of_views"):
        source = load_source(f"toys:{name}", CompileConfig())
        program = capture(source, CompileConfig())
        assert [spec.source for spec in program.inputs if spec.kind == "cache"] == ["state.0.sum"]
        module, args, kwargs = source.build()
        want = module(*args, **kwargs)["out"]
        _, args, kwargs = source.build()
        (got,) = program.graph_module(*tensors_of(program, *_in_order(args, kwargs)))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert re.fullmatch(r"decode-[0-9a-f]{12}", source.shape_key)


def _in_order(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, {name: kwargs[name] for name in ("x", "cache") if name in kwargs}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no_such_package.models:tiny", "there is no module 'no_such_package'"),
        ("toys:missing", "has no function 'missing'"),
        ("toys:NOT_CALLABLE", "has no function 'NOT_CALLABLE'"),
        ("toys:no_module", r"returned a int for the module"),
        ("toys:module_alone", r"returned a Branches; it must return \(module, example_inputs\)"),
        ("model.onnx:", "does not exist"),
    ],
)
def test_functions_that_give_no_model(source: str, message: str) -> None:
    assert re.search(message, refused(source))


def test_options_that_a_function_cannot_take() -> None:
    assert "--set does not apply" in refused("toys:running_sum", CompileConfig(overrides=(("a", "1"),)))


def test_config_as_published_is_json(tmp_path: Path) -> None:
    source = load_source(write_model(tmp_path, GLM), CONFIG)
    assert json.loads(json.dumps(source.key)) == source.key
