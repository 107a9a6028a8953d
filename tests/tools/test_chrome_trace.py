"""``kimigraph run --trace``: the steps of a real run, with the operators that they call."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kimigraph
from kimigraph.cli.app import make_app


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    layer = torch.nn.Linear(8, 8).eval()
    config = kimigraph.CompileConfig(target="cpu:reference", cache="off", report=False)
    return kimigraph.optimize(layer, (torch.ones(2, 8),), config).save(tmp_path / "artifact")


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(make_app(), ["run", *map(str, arguments)])


def test_each_step_is_a_span_around_the_operators_that_it_calls(artifact: Path, tmp_path: Path) -> None:
    done = run(artifact, "--repeat", 3, "--trace", tmp_path / "run.json")
    assert done.exit_code == 0, done.stderr
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    steps = {event["name"]: event for event in spans if event["name"].startswith("step ")}
    assert sorted(steps) == ["step 1", "step 2", "step 3"]
    assert all(event["dur"] > 0 for event in steps.values())
    products = [event for event in spans if event["name"] in ("aten::linear", "aten::addmm")]
    for step in steps.values():
        assert any(
            step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] for event in products
        )
    assert steps["step 1"]["ts"] < steps["step 2"]["ts"] < steps["step 3"]["ts"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "run.json"]


def test_a_path_that_cannot_be_written_is_refused_before_the_run(artifact: Path, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere" / "run.json"):
        done = run(artifact, "--trace", place)
        assert done.exit_code == 2 and "give a file in a directory that is there" in done.stderr
