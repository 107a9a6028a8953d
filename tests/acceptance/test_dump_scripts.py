"""Every dump of every pass is a script that prints the checksums of the captured program."""

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import kimigraph
from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.script import make_inputs
from kimigraph.ir.seeded import checksum
from kimigraph.passes import DumpPasses, PassContext, default_pipeline, run_pipeline
from kimigraph.passes.registry import BUILT_IN

TESTS = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5
"""Of the sum of magnitudes: checksums in fp32."""
MODELS = ("kimi_k31", "glm5_next", "deepseek_v32")
UNCHANGING = {
    "log-states",
    "defer-states",
    "shard",
    "share-indexer-rows",
    "share-tokens",
    "prune-index-exchange",
    "balance-indexer",
    "fuse-collectives",
    "split-stages",
    "overlap-communication",
    "page-caches",
    "fuse-indexer-attention",
    "insert-quantization",
    "interleave-halves",
    "split-indexer-prolog",
    "verify-schedule",
}
"""There are no drafts, no logs, no pages, no policy and no half-batches, merging a prolog is faster but for
glm5_next, and the last only looks."""
CHANGED = {
    "kimi_k31": set(BUILT_IN) - UNCHANGING,
    "glm5_next": set(BUILT_IN) - UNCHANGING - {"raise-attention-residual"} | {"split-indexer-prolog"},
    "deepseek_v32": set(BUILT_IN) - UNCHANGING - {"raise-attention-residual", "raise-kda"},  # no KDA layer
}
RUN_ALL = """
import runpy, sys
paths, sys.argv = sys.argv[1:], ["dump"]
for path in paths:
    print("script", path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""
"""Each argument as a script of its own, without the start of a process for each."""

Checksums = dict[str, list[float]]


@cache
def captured(model: str) -> tuple[CapturedProgram, CompileConfig]:
    """The captured program, not to be changed, and its configuration."""
    with TemporaryDirectory() as directory:
        name, config = source(model, Path(directory) / "model")
        return capture(load_source(name, config), config), config


def source(model: str, directory: Path) -> tuple[str, CompileConfig]:
    """K3.1 with four layers as in the example, the public models as in the tests of capture."""
    if model == "kimi_k31":
        layers = (("num_hidden_layers", "4"),)
        return str(TESTS.parent / "examples" / "k31_tiny"), CompileConfig(
            batch=2, context=64, overrides=layers, opt_level=3
        )
    spec = importlib.util.spec_from_file_location("tiny_models", TESTS / "capture" / "tiny_models.py")
    assert spec is not None and spec.loader is not None
    tiny: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    document = {"glm5_next": tiny.GLM, "deepseek_v32": tiny.DEEPSEEK}[model]
    return tiny.write_model(directory, document), CompileConfig(batch=2, context=24, opt_level=3)


def expected(program: CapturedProgram) -> Checksums:
    """What the scripts are to print: the captured program run here, on the same seeded tensors."""
    constants = {spec.source: program.tensors[spec.name] for spec in program.inputs if spec.kind == "constant"}
    tensors = make_inputs(program.inputs, constants, 0)
    with torch.no_grad():
        results = program.graph_module(*tensors)
    values = {spec.name: value for spec, value in zip(program.outputs, results, strict=True)}
    values |= {spec.source: tensor for spec, tensor in zip(program.inputs, tensors, strict=True) if spec.mutated}
    return {name: list(checksum(name, value, 0)) for name, value in values.items()}


def run_scripts(paths: list[Path], cwd: Path) -> dict[str, Checksums]:
    """What each script prints, in a process that sits elsewhere."""
    environment = {**os.environ, "PYTHONPATH": str(Path(kimigraph.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN_ALL, *map(str, paths)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd)
    assert ran.returncode == 0, ran.stderr
    printed: dict[str, Checksums] = {}
    current: Checksums = {}
    for name, *rest in (line.split() for line in ran.stdout.splitlines()):
        if name == "script":
            current = printed.setdefault(Path(rest[0]).stem, {})
        else:
            current[name] = [float(number) for number in rest]
    return printed


@pytest.mark.parametrize("model", MODELS)
def test_every_dump_runs_and_prints_the_captures_checksums(model: str, tmp_path: Path) -> None:
    original, config = captured(model)
    program, want = original.copy(), expected(original)
    records = run_pipeline(program, default_pipeline(config), PassContext(config), [DumpPasses(tmp_path / "dumps")])
    assert {record.name for record in records if record.result.modified} == CHANGED[model]

    printed = run_scripts(sorted((tmp_path / "dumps").glob("*.py")), tmp_path)
    assert list(printed) == ["000-capture", *(f"{n:03d}-{name}" for n, name in enumerate(BUILT_IN, 1))]
    assert all(magnitude > 1 for _, magnitude, _ in want.values())
    for stem, found in printed.items():
        assert found.keys() == want.keys(), stem
        for key, numbers in want.items():
            assert found[key] == pytest.approx(numbers, rel=0, abs=TOLERANCE * numbers[1]), f"{stem}: {key}"


def test_a_dump_with_another_number_in_it_prints_other_checksums(tmp_path: Path) -> None:
    original, config = captured("deepseek_v32")
    program, want = original.copy(), expected(original)
    run_pipeline(program, default_pipeline(config), PassContext(config), [DumpPasses(tmp_path / "dumps")])
    [path] = (tmp_path / "dumps").glob("*-fuse-sparse-attention.py")
    text = path.read_text(encoding="utf-8")
    at = text.index("sparse_attention.default(")
    path.write_text(text[:at] + text[at:].replace("scale=", "scale=0.5 * ", 1), encoding="utf-8")
    [found] = run_scripts([path], tmp_path).values()
    wrong = [key for key, numbers in want.items() if abs(found[key][0] - numbers[0]) > TOLERANCE * numbers[1]]
    assert wrong and wrong != list(want)
