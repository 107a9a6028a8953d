"""``.pt2`` files: written, read where the model's code is not, and refused where they ask for more than a program."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

from kimigraph.capture import load_source
from kimigraph.capture.eager import eager_step
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.pt2_export import export_pt2

ROOT = Path(__file__).parents[2]
CONFIG = CompileConfig(target="cpu:reference")
SOURCE = """
import torch

class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x, cache, scale=2.0):
        cache["cache.0.last"][:, 1:3] = torch.tanh(self.project(x)).unsqueeze(1)
        self.steps.add_(1)
        return {"out": cache["cache.0.last"].sum(1) * scale + self.steps, "n": 3}

def step():
    torch.manual_seed(0)
    return Step().eval(), (torch.ones(2, 8), {"cache.0.last": torch.zeros(2, 4, 8)})
"""
FRESH = """
import sys, torch, kimigraph
torch.set_num_threads(1)
step = kimigraph.load("artifact", weights="m.pt2")
cache = {"cache.0.last": torch.zeros(2, 4, 8)}
result = step(torch.ones(2, 8), cache)
assert not any(name in sys.modules for name in ("pt2_model", "transformers")), "the model's code was needed"
print([result["n"], result["out"].tolist(), cache["cache.0.last"].tolist()])
"""


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pt2_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "pt2_model", raising=False)
    report = export_pt2("pt2_model:step", CONFIG, tmp_path / "m.pt2", lambda _: None)
    assert report.verify["passed"] and report.verify["outputs"] == 3
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix) == ["m.pt2", "pt2_model.py"]
    return tmp_path / "m.pt2"


def test_a_loaded_artifact_needs_no_code_of_the_model(exported: Path) -> None:
    want = eager_step(load_source("pt2_model:step", CONFIG))
    (exported.parent / "pt2_model.py").unlink()
    (report,) = compile_source("m.pt2", [CONFIG], exported.parent / "artifact", lambda _: None)
    assert report.source == "m"
    command = [sys.executable, "-c", FRESH]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    number, out, cache = json.loads(done.stdout)
    assert number == 3
    torch.testing.assert_close(torch.tensor(out), want.outputs["output.out"])
    torch.testing.assert_close(torch.tensor(cache), want.inputs["cache.0.last"])


def test_names_lines_and_facts_survive(tmp_path: Path) -> None:
    from tiny_models import KIMI, write_model

    from kimigraph.capture import capture

    config = CompileConfig(target="cpu:reference", context=16)
    directory = write_model(tmp_path / "model", KIMI)
    export_pt2(directory, config, tmp_path / "m.pt2", lambda _: None)
    want, got = (
        capture(load_source(directory, config), config),
        capture(load_source(str(tmp_path / "m.pt2"), CONFIG), CONFIG),
    )
    assert [vars(spec) for spec in got.inputs] == [vars(spec) for spec in want.inputs]
    assert got.outputs == want.outputs
    nodes = [node for node in got.graph_module.graph.nodes if node.op == "call_function"]
    assert all("models" in str(node.meta["stack_trace"]) for node in nodes if node.name.startswith("linear"))
    assert any("layers.0" in str(node.meta.get("nn_module_stack")) for node in nodes)


def changed(path: Path, change: Callable[[str, bytes], bytes | None], compression: int = zipfile.ZIP_STORED) -> Path:
    """A copy of the archive with other contents; None leaves a part out."""
    other = path.with_name("changed.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w", compression) as new:
        for entry in old.infolist():
            data = change(entry.filename, old.read(entry.filename))
            if data is not None:
                new.writestr(entry.filename, data)
    return other


def in_program(change: Callable[[Any], Any]) -> Callable[[str, bytes], bytes | None]:
    def changed_part(name: str, data: bytes) -> bytes:
        if "/models/" not in name:
            return data
        document = json.loads(data)
        change(document)
        return json.dumps(document).encode()

    return changed_part


def retarget(document: Any) -> None:
    document["graph_module"]["graph"]["nodes"][0]["target"] = "torch.hub.load_state_dict_from_url"
    document["graph_module"]["graph"]["nodes"][1]["target"] = "torch.ops.mine.thing.default"


def pickled(name: str, data: bytes) -> bytes:
    return data.replace(b'"use_pickle": false', b'"use_pickle": true') if name.endswith("_config.json") else data


class Runs:
    def __reduce__(self) -> Any:
        return os.getpid, ()


def example_with_code(name: str, data: bytes) -> bytes:
    if "sample_inputs" not in name:
        return data
    import io

    buffer = io.BytesIO()
    torch.save(((torch.ones(1), Runs()), {}), buffer)
    return buffer.getvalue()


def dataclass_tree(document: Any) -> None:
    signature = document["graph_module"]["module_call_graph"][0]["signature"]
    signature["in_spec"] = signature["in_spec"].replace("builtins.dict", "mine.Cache")


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (in_program(lambda d: d.update(guards_code=["__import__('os').getpid()"])), ["Python code that guards"]),
        (in_program(lambda d: d["range_constraints"].update(s={"expr_str": "exit()"})), ["'exit()'"]),
        (in_program(retarget), ["torch.hub.load_state_dict_from_url", "torch.ops.mine.thing.default"]),
        (in_program(dataclass_tree), ["takes or returns a mine.Cache"]),
        (pickled, ["is pickled, and nothing is unpickled"]),
        (example_with_code, ["more than tensors and plain values"]),
        (lambda name, data: None if "/models/" in name else data, ["holds 0 programs"]),
        (lambda name, data: b"{" if "/models/" in name else data, ["no .pt2 file of torch.export, or a damaged one"]),
        (
            lambda name, data: data.replace(b'"as_int": 8', b'"as_int": 999999999') if "_config" in name else data,
            ["has sizes"],
        ),
        (
            lambda name, data: b'{"inputs": 3}' if name.endswith("kimigraph.json") else data,
            ["not what kimigraph writes"],
        ),
    ],
)
def test_what_asks_for_more_than_a_program_is_refused(change: Any, messages: list[str], exported: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_source(str(changed(exported, change)), CONFIG)
    assert all(message in str(caught.value) for message in messages), caught.value


def test_a_compressed_archive_and_no_archive_are_refused(exported: Path) -> None:
    packed = changed(exported, lambda name, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(UsageError, match="compressed"):
        load_source(str(packed), CONFIG)
    packed.write_bytes(b"no archive")
    with pytest.raises(UsageError, match=r"no \.pt2 file"):
        load_source(str(packed), CONFIG)
    for field in ({"dtype": "bfloat16"}, {"overrides": (("a", "1"),)}):
        with pytest.raises(UsageError, match="does not apply"):
            load_source(str(exported), CompileConfig(**field))


def test_a_file_of_torch_alone_is_a_source_and_open_sizes_are_refused(tmp_path: Path) -> None:
    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    x = torch.arange(6.0).reshape(2, 3)
    torch.export.save(torch.export.export(Double(), (x,)), str(tmp_path / "fixed.pt2"))
    step = eager_step(load_source(str(tmp_path / "fixed.pt2"), CONFIG))
    torch.testing.assert_close(step.outputs["output"], x * 2)
    open_size = torch.export.export(Double(), (x,), dynamic_shapes={"x": {0: Dim("n", min=2)}})
    torch.export.save(open_size, str(tmp_path / "open.pt2"))
    with pytest.raises(UsageError, match="export it with fixed sizes"):
        load_source(str(tmp_path / "open.pt2"), CONFIG)
