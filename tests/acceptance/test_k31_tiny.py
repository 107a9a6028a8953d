"""The example model from its directory to a verified program, and that nothing of it is keyed to names or spelling."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node

from kimigraph.capture import capture, load_source
from kimigraph.capture.program import tensors_of
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.report import CompileReport
from kimigraph.passes import PassContext, Pipeline, default_pipeline, fusion_summary, registered_passes, run_pipeline
from kimigraph.passes.registry import BUILT_IN
from kimigraph.run import run_artifact
from kimigraph.verify import run_graph

ATEN = torch.ops.aten
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
LAYERS = {
    "raise-kda": 3,
    "raise-attention-residual": 8,
    "raise-cache-writes": 2,
    "raise-moe": 3,
    "fuse-lightning-indexer": 1,
    "fuse-sparse-attention": 1,
    "fuse-indexer-attention": 0,
}
"""Layers 0 to 2 are KDA layers, layer 3 is a DSA layer; every sublayer but the first mixes blocks, and the output; all
layers but the first have experts."""
GENERATED = ("pointwise", "horizontal", "rms_norm")
NORMS = {"raise-norms": 5}
"""The first norm, the one behind the experts of each feed-forward layer but the first, the query's in the DSA layer:
that layer's latents are normed where they are written."""
MERGED = {"merge-horizontal": 9}
"""The products that read one tensor: one group in a KDA layer, two in the DSA layer, one in each feed-forward layer."""


def tiny(**fields: Any) -> CompileConfig:
    shape = {"target": "cpu:reference", "batch": 2, "context": 256, "overrides": (("num_hidden_layers", "4"),)}
    return CompileConfig(**{**shape, "cache": "off", **fields})


@pytest.fixture(scope="session")
def verified(tmp_path_factory: pytest.TempPathFactory) -> tuple[CompileReport, Path]:
    out = tmp_path_factory.mktemp("k31") / "artifact"
    return compile_source(EXAMPLE, [tiny(verify=True)], out, print)[0], out


@pytest.fixture(scope="session")
def captured() -> CapturedProgram:
    """Odd sizes throughout: batch 3, context 37."""
    config = tiny(batch=3, context=37)
    return capture(load_source(EXAMPLE, config), config)


def counts(program: CapturedProgram) -> dict[str, int]:
    """Optimize ``program`` in place; how often each fusion that makes or merges operators fired."""
    config = tiny()
    records = run_pipeline(program, default_pipeline(config), PassContext(config))
    return {e["rule"]: e["count"] for e in fusion_summary(records) if e["rule"] != "fuse-pointwise"}


def test_a_decode_step_is_verified_and_fused_once_for_each_layer(verified: tuple[CompileReport, Path]) -> None:
    report, _ = verified
    assert report.verify is not None and report.verify["passed"]
    assert report.verify["max_rel_err"] <= report.verify["tolerance"] == 1e-4
    found = {entry["rule"]: entry["count"] for entry in report.fusions}
    assert found.pop("fuse-pointwise") >= 5 and found == LAYERS | NORMS | MERGED
    assert sorted(kernel["op"] for kernel in report.kernels if kernel["op"] not in GENERATED) == [
        *["attention_residual"] * 8, "kda_decode", "kda_decode", "kda_decode", "lightning_indexer", "moe_experts",
        "moe_experts", "moe_experts", "sparse_attention",
    ]  # fmt: skip
    together = [kernel for kernel in report.kernels if kernel["op"] == "horizontal"]
    assert any({"latent_write", "index_key_write"} <= set(kernel["replaces"]) for kernel in together), (
        "the writes of both caches share a launch"
    )
    assert report.launches["after"] < report.launches["before"]


@pytest.mark.parametrize("fields", [{"marks": False}, {"opt_level": 0}], ids=["no marks", "O0"])
def test_other_ways_to_the_same_numbers(
    verified: tuple[CompileReport, Path], tmp_path: Path, fields: dict[str, Any]
) -> None:
    compile_source(EXAMPLE, [tiny(**fields)], tmp_path / "other", print)
    manifests = [json.loads((path / "manifest.json").read_text()) for path in (verified[1], tmp_path / "other")]
    sums = [manifest["checksums"] for manifest in manifests]
    assert sums[0].keys() == sums[1].keys()
    assert len(sums[0]) == 1 + 3 * 2 + 3  # logits, two tensors of each KDA layer, three of the DSA layer
    for name in sums[0]:
        assert sums[0][name] == pytest.approx(sums[1][name], rel=1e-4, abs=1e-4 * sums[0][name][1])
    operators = [kernel["op"] for kernel in manifests[1]["kernels"] if kernel["op"] not in GENERATED]
    written = LAYERS["raise-cache-writes"]  # parts of a horizontal kernel
    assert len(operators) == (0 if "opt_level" in fields else sum(LAYERS.values()) - written)


def test_the_program_runs_where_kimigraph_cannot_be_imported(verified: tuple[CompileReport, Path]) -> None:
    _, directory = verified
    manifest = json.loads((directory / "manifest.json").read_text())
    code = (
        "import runpy, sys; sys.modules['kimigraph'] = None; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, str(directory / "program.py"), "--check"],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    printed = {name: list(map(float, numbers)) for name, *numbers in map(str.split, ran.stdout.splitlines())}
    assert printed.keys() == manifest["checksums"].keys()
    for name, numbers in manifest["checksums"].items():
        assert printed[name] == pytest.approx(numbers, abs=manifest["tolerance"] * numbers[1])
    assert run_artifact(directory, None, None, 1)["passed"] is True


def test_the_pipeline_of_every_level_parses_back() -> None:
    for level in range(4):
        pipeline = default_pipeline(tiny(opt_level=level))
        assert Pipeline.parse(str(pipeline)) == pipeline
        assert pipeline.names == [name for name in BUILT_IN if 0 < registered_passes()[name].level <= level]


def _renamed(program: CapturedProgram) -> CapturedProgram:
    """Every node, tensor and module loses its name; nothing says any more where in which model a node was."""
    copy = program.copy()
    names: dict[str, str] = {}
    for index, node in enumerate(copy.graph_module.graph.nodes):
        old, node.name = node.name, f"v{index}"
        names[old] = node.name
        if node.op == "placeholder":
            node.target = node.name
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    copy.graph_module.recompile()
    inputs = tuple(
        replace(spec, name=names[spec.name], source=f"t{index}") for index, spec in enumerate(program.inputs)
    )
    outputs = tuple(replace(spec, name=names[spec.name], source=f"o{i}") for i, spec in enumerate(program.outputs))
    tensors = {names[name]: tensor for name, tensor in program.tensors.items()}
    return replace(copy, inputs=inputs, outputs=outputs, tensors=tensors, info={})


def _swapped(program: CapturedProgram) -> CapturedProgram:
    """The two tensors of every addition and multiplication change places."""
    copy = program.copy()
    for node in copy.graph_module.graph.nodes:
        commutes = node.target in (ATEN.add.Tensor, ATEN.mul.Tensor) and not node.kwargs
        if commutes and len(node.args) == 2 and all(isinstance(item, Node) for item in node.args):
            node.args = (node.args[1], node.args[0])
    copy.graph_module.recompile()
    return copy


SPELLINGS: dict[str, Callable[[CapturedProgram], CapturedProgram]] = {
    "as it is": CapturedProgram.copy,
    "renamed": _renamed,
    "swapped": _swapped,
    "renamed and swapped": lambda program: _swapped(_renamed(program)),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_names_order_and_sizes_change_no_count(captured: CapturedProgram, spelling: str) -> None:
    program = SPELLINGS[spelling](captured)
    before = anchors(program)
    assert before == {"topk": 1, "softmax": 1, "scatter": 1}
    assert counts(program) == LAYERS | NORMS | MERGED
    assert anchors(program) == dict.fromkeys(before, 0)


def anchors(program: CapturedProgram) -> dict[str, int]:
    """Nodes over all 37 places of the cache that only the unfused attention has (experts have a top-k of their own)."""
    found = {"topk": 0, "softmax": 0, "scatter": 0}
    for node in program.graph_module.graph.nodes:
        name = str(node.target).removeprefix("aten.")
        for anchor in found:
            if anchor in name and node.op == "call_function":
                operand = node.args[0].meta["val"]
                found[anchor] += operand.shape[-1] == 37
    return found


def test_a_program_without_names_computes_the_same(captured: CapturedProgram) -> None:
    program = SPELLINGS["renamed and swapped"](captured)
    _, args, kwargs = load_source(EXAMPLE, tiny(batch=3, context=37)).build(30)
    want, _ = run_graph(captured, tensors_of(captured, args, kwargs))
    counts(program)
    got, _ = run_graph(program, tensors_of(program, args, kwargs))
    for name, other in zip(want.values, got.values, strict=True):
        scale = want.values[name].abs().max().item()
        torch.testing.assert_close(got.values[other], want.values[name], atol=1e-4 * max(scale, 1e-3), rtol=0)
