"""A traced replay on the device: every kernel has the name of a node, and the gaps add up."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimigraph.cli.app import make_app
from kimigraph.ir.trace import read_timeline

pytestmark = pytest.mark.gpu

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")


def test_a_replay_is_measured_beside_the_plan(tmp_path: Path) -> None:
    artifact, out = tmp_path / "step", tmp_path / "timeline.json"
    options = ["--target", "cuda", "--dtype", "bfloat16", "--context", "256", "--set", "num_hidden_layers=4"]
    compiled = CliRunner().invoke(make_app(), ["compile", EXAMPLE, *options, "--cache", "off", "--out", str(artifact)])
    assert compiled.exit_code == 0, compiled.output
    result = CliRunner().invoke(make_app(), ["timeline", str(artifact), "--measure", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)["measured"]
    assert measured["span_us"] == pytest.approx(measured["busy_us"] + measured["idle_us"], abs=0.01)
    planned, traced = read_timeline(out)
    named = {span.name for span in planned.kernels} & {span.name for span in traced.kernels}
    assert len(named) >= 0.9 * len(planned.kernels)
