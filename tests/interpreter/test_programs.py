"""A whole program on target ``cpu``: the kernels under the interpreter, with every reference out of reach."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kimigraph
from kimigraph.capture import load_source
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.report import CompileReport
from kimigraph.run import run_artifact

EXAMPLE = Path(__file__).parents[2] / "examples" / "k31_tiny"
CONFIG = CompileConfig(
    target="cpu",
    batch=2,
    context=24,
    verify=True,
    cache="off",
    overrides=(("num_hidden_layers", "4"), ("index_topk", "5")),
)


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompileReport, Path]:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("k31") / "artifact"
    return compile_source(str(EXAMPLE), [CONFIG], out, print)[0], out


def test_the_example_is_verified_on_its_kernels(verified: tuple[CompileReport, Path]) -> None:
    report, directory = verified
    assert report.verify is not None and report.verify["passed"]
    counts = {entry["rule"]: entry["count"] for entry in report.fusions}
    wanted = {"raise-kda": 3, "fuse-lightning-indexer": 1, "fuse-sparse-attention": 1, "merge-horizontal": 9}
    assert {rule: counts[rule] for rule in wanted} == wanted
    assert counts["fuse-pointwise"] > 0
    assert {kernel["op"] for kernel in report.kernels} >= {
        "attention_residual", "kda_decode", "lightning_indexer", "sparse_attention", "pointwise"
    }  # fmt: skip
    assert not (directory / "kernels" / "reference.py").exists()
    assert json.loads((directory / "manifest.json").read_text())["reference"] == "cpu:reference"


def test_it_runs_without_the_references(verified: tuple[CompileReport, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, directory = verified
    source = load_source(str(EXAMPLE), CONFIG)
    model, args, _ = source.build(17)
    _, same, _ = source.build(17)
    with torch.no_grad():
        want = model(*args)

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a reference was called")

    for operator in OPERATORS.values():
        monkeypatch.setattr(operator, "reference", unreachable)
    with pytest.raises(AssertionError, match="a reference was called"):
        torch.ops.kimigraph.short_conv(torch.ones(1, 3, 2), torch.ones(2, 4), None, activation=True)
    got = kimigraph.load(directory)(*same)
    torch.testing.assert_close(got, want, atol=1e-4 * want.abs().max().item(), rtol=0)
    for name, tensor in args[2].items():
        limit = 1e-4 * max(tensor.abs().max().item(), 1e-3)
        torch.testing.assert_close(same[2][name], tensor, atol=limit, rtol=0, msg=name)
    assert run_artifact(directory, None, None, 1)["passed"] is True
