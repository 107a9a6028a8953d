"""``kimigraph export onnx``: files, paths, failures and what is said about them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from kimigraph.adapters.onnx_model import OnnxSession

SOURCE = """
import torch

class Step(torch.nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.project = torch.nn.Linear(64, 64, dtype=dtype)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x, cache):
        cache["last"].copy_(torch.tanh(self.project(x)))
        self.steps.add_(1)
        return cache["last"] * 2 + self.steps.to(x.dtype)

class Odd(torch.nn.Module):
    def forward(self, x):
        return torch.special.i0(x) + torch.linalg.matrix_exp(x)

def step():
    torch.manual_seed(0)
    return Step().eval(), (torch.ones(2, 64), {"last": torch.zeros(2, 64)})

def narrow():
    return Step(torch.bfloat16).eval(), (torch.ones(2, 64).bfloat16(), {"last": torch.zeros(2, 64).bfloat16()})

def odd():
    return Odd(), (torch.eye(3),)

def slow():
    import time
    print("started", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnx_sources.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "onnx_sources", raising=False)


def run_model(path: Path) -> dict[str, torch.Tensor]:
    feeds = {"x": torch.ones(2, 64), "last": torch.zeros(2, 64), "cache.last": torch.zeros(2, 64)}
    session = OnnxSession(path, 1)
    return session.run({**feeds, "steps": torch.zeros(1)})


def test_states_and_counters_are_inputs_and_outputs_and_the_document_says_so(cli: Any, tmp_path: Path) -> None:
    done = cli("export", "onnx", "onnx_sources:step", "--out", "a.onnx", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["states"]) == 2 and document["states"]["steps"] == "steps.next"
    assert all(output == f"{name}.next" for name, output in document["states"].items())
    assert document["verify"]["passed"] and document["verify"]["max_rel_err"] <= 1e-4
    assert (document["opset"], document["data"]) == (20, None)
    proto = onnx.load("a.onnx")
    assert {item.key: item.value for item in proto.metadata_props}["state steps"] == "steps.next"
    assert {item.domain: item.version for item in proto.opset_import} == {"": 20}
    assert run_model(tmp_path / "a.onnx")["steps.next"].tolist() == [1.0]
    assert "onnx_sources.py" in proto.graph.node[-3].doc_string or any(
        "onnx_sources.py" in node.doc_string for node in proto.graph.node
    )


def test_large_weights_lie_beside_the_model_and_are_found_from_anywhere(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "Ordner mit Ümläuten 模型"
    done = cli("export", "onnx", "onnx_sources:step", "--out", folder / "a.onnx", "--external-above", "1K")
    assert done.exit_code == 0, done.stderr
    model, data = sorted(folder.iterdir(), key=lambda path: path.suffix == ".data")
    assert model.name == "a.onnx" and data.name.startswith("a-")
    assert data.stat().st_mode == model.stat().st_mode
    proto = onnx.load(str(model), load_external_data=False)
    places = {e.value for item in proto.graph.initializer for e in item.external_data if e.key == "location"}
    assert places == {data.name}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert run_model(model)["steps.next"].tolist() == [1.0]
    monkeypatch.chdir(tmp_path)
    assert cli("export", "onnx", "onnx_sources:step", "--out", folder / "a.onnx").exit_code == 0
    assert [path.name for path in folder.iterdir()] == ["a.onnx"]  # the old weights went with the old model


def test_unsupported_operators_are_listed_and_nothing_is_written(cli: Any, tmp_path: Path) -> None:
    done = cli("export", "onnx", "onnx_sources:odd", "--out", "a.onnx")
    assert done.exit_code == 1
    assert "i0" in done.stderr and "matrix_exp" in done.stderr and "2 operators" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["onnx_sources.py"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["onnx_sources:step", "--out", "a.pb"], 2, "ends in .onnx"),
        (["onnx_sources:step", "--out", os.fsdecode(b"\xff.onnx")], 2, "no UTF-8 path"),
        (["onnx_sources:step", "--out", "a.onnx", "--external-above", "much"], 2, "no size"),
        (["onnx_sources:narrow", "--out", "a.onnx"], 1, "model.float()"),
        (["nowhere", "--out", "a.onnx"], 2, "does not exist"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(cli: Any, arguments: list[str], code: int, message: str) -> None:
    done = cli("export", "onnx", *arguments)
    assert (done.exit_code, message in done.stderr) == (code, True), done.stderr


@pytest.mark.slow
def test_a_model_in_bf16_is_exported_in_fp32_and_says_so(cli: Any, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "k31_tiny" / "config.json"
    (tmp_path / "model").mkdir()
    document = json.loads(example.read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(document))
    options = ["--set", "num_hidden_layers=4", "--context", "32", "--out", "a.onnx"]
    done = cli("export", "onnx", "model", *options, "--json")
    assert done.exit_code == 0, done.stderr
    assert "exported in float32: the model is in bfloat16" in json.loads(done.stdout)["notes"][0]
    done = cli("export", "onnx", "model", *options, "--dtype", "bfloat16")
    assert done.exit_code == 2 and "no bf16 products" in done.stderr


def test_an_interrupted_export_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"old")
    command = [sys.executable, "-m", "kimigraph", "export", "onnx", "onnx_sources:slow", "--out", "a.onnx"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    assert process.stderr is not None and process.stderr.readline() == "started\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert (tmp_path / "a.onnx").read_bytes() == b"old"
    assert not list(tmp_path.glob(".kimigraph-*"))


def test_a_pt2_file_is_written_and_compiled_without_the_models_code(cli: Any, tmp_path: Path) -> None:
    done = cli("export", "pt2", "onnx_sources:step", "--out", "a.pt2", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["verify"]["passed"] and document["nodes"] > 4 and document["shape_key"].startswith("decode-")
    (tmp_path / "onnx_sources.py").unlink()
    done = cli("compile", "a.pt2", "--target", "cpu:reference", "--out", "artifact")
    assert done.exit_code == 0, done.stderr
    assert cli("export", "pt2", "a.pt2", "--out", "a.zip").exit_code == 2
