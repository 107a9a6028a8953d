"""Models as ``.onnx`` files and back: files of torch.onnx alone and our own give the fusions of the model itself."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import write_config
from torch import Tensor, nn

from kimigraph import load
from kimigraph.capture import ModelSource, capture, load_source
from kimigraph.capture.eager import eager_step
from kimigraph.compiler import compile_source
from kimigraph.ir.accuracy import deviation
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.onnx_export import export_onnx
from kimigraph.passes import default_pipeline, fusion_summary, run_pipeline
from kimigraph.session import pass_context

CONFIG = CompileConfig(target="cpu:reference", batch=2, context=24, dtype="float32")
READ = CompileConfig(target="cpu:reference")
RULES = (
    "raise-kda",
    "raise-attention-residual",
    "raise-moe",
    "fuse-lightning-indexer",
    "fuse-sparse-attention",
)
slow = pytest.mark.slow
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}


def fused(source: ModelSource, config: CompileConfig) -> tuple[dict[str, int], dict[str, int]]:
    """How often each rule fired, and which semantic operators there are in the end."""
    program = capture(source, config)
    records = run_pipeline(program, default_pipeline(config), pass_context(config), [])
    counts = {entry["rule"]: entry["count"] for entry in fusion_summary(records) if entry["rule"] in RULES}
    operators: dict[str, int] = {}
    for node in program.graph_module.graph.nodes:
        name = str(node.target)
        # Norms may end inside regions, or not, by the views around them.
        if name.startswith("kimigraph.") and "rms_norm" not in name:
            operators[name] = operators.get(name, 0) + 1
    return counts, operators


class Functional(nn.Module):
    """A step that returns the new states, as torch.onnx wants it: it drops what is updated in place."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, *inputs: Any) -> Any:
        *front, cache = inputs
        states = {name: state.clone() for name, state in cache.items()}
        result = self.step(*front, states)
        return (result if isinstance(result, Tensor) else result[0]), states


def written_by_torch(source: ModelSource, path: Path, **options: Any) -> str:
    module, args, kwargs = source.build()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(Functional(module).eval(), args, kwargs, strict=False)
        states = [f"{name}.next" for name in args[-1]]
        names = [f"in{place}" for place in range(len(args) - 1)] + list(args[-1])
        program: Any = torch.onnx.export(
            exported, input_names=names, output_names=["logits", *states], verbose=False, **options
        )
    program.save(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("model_type", "fields", "options"),
    [
        ("deepseek_v32", ONE_LAYER, {}),
        ("glm5_next", {}, {}),  # masks that pick, pooled keys, and the delta rule
        *(
            pytest.param(model_type, {}, {"optimize": optimize}, marks=slow)
            for model_type in ("kimi_k31", "kimi_k3", "deepseek_v32", "glm_moe_dsa", "kimi_linear", "glm5_next")
            for optimize in (True, False)
            if (model_type, optimize) != ("glm5_next", True)
        ),
    ],
)
def test_a_file_of_torch_onnx_has_the_fusions_and_the_values_of_the_model(
    model_type: str, fields: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    source = load_source(write_config(tmp_path / "model", model_type, **fields), CONFIG)
    read = load_source(written_by_torch(source, tmp_path / "m.onnx", **options), READ)
    assert fused(read, READ) == fused(source, CONFIG)
    module, args, kwargs = source.build()
    ours, (*front, cache), _ = read.build()
    assert set(cache) == set(args[-1])
    for state, values in args[-1].items():
        cache[state].copy_(values)
    for mine, theirs in zip(front, args[:-1], strict=True):
        mine.copy_(theirs)
    with torch.no_grad():
        result = module(*args, **kwargs)
        (logits,) = ours(*front, cache)
    want = {"logits": result if isinstance(result, Tensor) else result[0], **args[-1]}
    error = deviation({"logits": logits, **cache}, want)
    assert error.passed, error


@slow
@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_a_prompt_of_torch_onnx_has_the_fusions_of_the_model(model_type: str, tmp_path: Path) -> None:
    """Prompts of models with a delta rule are marked where they are captured, and a file has no marks."""
    prompts, read = replace(CONFIG, phase="prefill"), replace(READ, phase="prefill")
    source = load_source(write_config(tmp_path / "model", model_type), prompts)
    file = load_source(written_by_torch(source, tmp_path / "m.onnx"), read)
    want = fused(source, prompts)
    assert fused(file, read) == want and want[0]["fuse-sparse-attention"] == 2


@slow
def test_a_prompt_of_standard_operators_alone_is_read_back_with_its_scans_unrolled(tmp_path: Path) -> None:
    config = replace(CONFIG, phase="prefill", tokens=6)
    directory = write_config(tmp_path / "model", "kimi_linear")
    report = export_onnx(directory, config, tmp_path / "m.onnx", lambda _: None, flat=True)
    assert not report.functions
    ours, theirs = eager_step(load_source(str(tmp_path / "m.onnx"), READ)), eager_step(load_source(directory, config))
    error = deviation({**ours.outputs, **ours.inputs}, {**theirs.outputs, **theirs.inputs})
    assert error.passed, error


@pytest.mark.parametrize(
    ("model_type", "fields", "level"),
    [
        pytest.param("deepseek_v32", ONE_LAYER, 0, marks=slow),
        *(
            pytest.param(model_type, {}, level, marks=slow)
            for model_type in ("kimi_k31", "kimi_k3", "deepseek_v32", "glm_moe_dsa", "kimi_linear", "glm5_next")
            for level in (0, 2)
        ),
    ],
)
def test_exported_and_read_again_a_model_has_the_same_operators(
    model_type: str, fields: dict[str, Any], level: int, tmp_path: Path
) -> None:
    directory = write_config(tmp_path / "model", model_type, **fields)
    source = load_source(directory, CONFIG)
    exporting = CompileConfig(batch=2, context=24, dtype="float32", opt_level=level)
    export_onnx(directory, exporting, tmp_path / "m.onnx", lambda _: None)
    read = load_source(str(tmp_path / "m.onnx"), READ)
    want, got = fused(source, CONFIG), fused(read, READ)
    assert got[1] == want[1] and want[1]
    if level == 0:  # with functions the operators are there from the start
        assert got[0] == want[0]
    ours, theirs = eager_step(read), eager_step(source)
    assert ours.inputs.keys() == theirs.inputs.keys() and ours.outputs.keys() == theirs.outputs.keys()
    facts = {spec.source: (spec.kind, spec.descriptor, spec.value_range) for spec in capture(source, CONFIG).inputs}
    for spec in capture(read, READ).inputs:
        if not spec.bound:
            assert facts[spec.source] == (spec.kind, spec.descriptor, spec.value_range), spec.source


@pytest.mark.parametrize("verify", [False, pytest.param(True, marks=slow)])
def test_a_file_is_compiled_verified_and_bound_to_its_own_weights(verify: bool, tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", "deepseek_v32", **ONE_LAYER)
    export_onnx(directory, CompileConfig(context=24, dtype="float32"), tmp_path / "m.onnx", lambda _: None)
    path = str(tmp_path / "m.onnx")
    (report,) = compile_source(path, [replace(READ, verify=verify)], tmp_path / "artifact", lambda _: None)
    assert report.source == "m" and (not verify or report.verify["passed"])
    assert {"lightning_indexer", "sparse_attention"} <= {kernel["op"] for kernel in report.kernels}
    with pytest.raises(UsageError, match="holds no weights"):
        load(tmp_path / "artifact")
    source = load_source(path, READ)
    _, (ids, cache), _ = source.build()
    (logits,) = load(tmp_path / "artifact", weights=path)(ids, cache)
    assert deviation({"logits": logits, **cache}, {**eager_step(source).outputs, **eager_step(source).inputs}).passed
