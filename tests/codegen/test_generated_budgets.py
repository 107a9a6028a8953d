"""Every kernel that is generated for the public test models compiles for sm_90 within a budget of registers."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from kimigraph.capture import capture, load_source
from kimigraph.codegen import build_artifact
from kimigraph.ir.config import CompileConfig
from kimigraph.passes import PassContext, default_pipeline, run_pipeline

REGISTERS = 128
"""A thread's, so that four programs of four warps fit on a multiprocessor; nothing may spill."""
REDUCTION = 32
"""Bytes of stack in which CUDA's cosine and sine reduce large angles."""
GENERATED = ("pointwise_", "horizontal_", "rms_norm_")


def tiny_models() -> Any:
    path = Path(__file__).parents[1] / "capture" / "tiny_models.py"
    spec = importlib.util.spec_from_file_location("tiny_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "batch"), [("DEEPSEEK", 3), ("GLM", 1)])
def test_generated_kernels_stay_within_the_budget(
    name: str, batch: int, tmp_path: Path, artifact_directory: Path
) -> None:
    models = tiny_models()
    source = models.write_model(tmp_path / "model", getattr(models, name))
    config = CompileConfig("cuda:sm_90", 2, batch=batch, context=64, dtype="bfloat16", cache="off")
    program = capture(load_source(source, config), config)
    run_pipeline(program, default_pipeline(config), PassContext(config))
    build_artifact(program, "cuda:sm_90", artifact_directory, self_test=False)
    paths = [p for p in sorted((artifact_directory / "kernels").glob("*.json")) if p.name.startswith(GENERATED)]
    assert len(paths) > 4
    for path in paths:
        facts = json.loads(path.read_text(encoding="utf-8"))
        text = path.with_name(path.name.split(".")[0] + ".py").read_text(encoding="utf-8")
        turns = "tl.cos(" in text or "tl.sin(" in text
        assert facts["registers"] <= REGISTERS and facts["stack_bytes"] <= (REDUCTION if turns else 0), path.name
