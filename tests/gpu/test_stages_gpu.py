"""Stages of a pipeline on one GPU: one process runs them in turn, with and without graphs, as one program would."""

from dataclasses import replace
from pathlib import Path

import pytest

from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.run import run_artifact
from kimigraph.tools.run_stages import run_stages

pytestmark = pytest.mark.gpu
MODEL = Path(__file__).parents[2] / "examples" / "k31_tiny"


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decode step of K3.1 as one program and as two stages."""
    root = tmp_path_factory.mktemp("stages")
    four = CompileConfig(
        target="cuda", batch=2, context=256, cache="off", report=False, overrides=(("num_hidden_layers", "4"),)
    )
    for name, stages in (("one", 1), ("two", 2)):
        compile_source(str(MODEL), [replace(four, pp=stages)], root / name, lambda message: None)
    return root


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_stages_compute_what_one_program_does(cuda_graph: bool, artifacts: Path) -> None:
    one = run_artifact(artifacts / "one", None, None, 3, cuda_graph=cuda_graph)
    two = run_stages(artifacts / "two", None, None, 3, cuda_graph=cuda_graph)
    assert one["passed"] and two["passed"] and two["outputs"].keys() == one["outputs"].keys()
    for name, sums in one["outputs"].items():
        assert two["outputs"][name] == pytest.approx(sums, rel=0, abs=2e-2 * abs(sums[1])), name  # bf16
