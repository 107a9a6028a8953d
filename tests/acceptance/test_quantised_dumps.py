"""Dumps of a compilation under a policy: each runs, caches start and end as the captured ones that they hold."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kimigraph
from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.passes import DumpPasses, PassContext, default_pipeline, run_pipeline

ROOT = Path(__file__).parents[2]
CONFIG = CompileConfig(target="cpu:reference", batch=2, context=24, overrides=(("num_hidden_layers", "4"),))


def printed(path: Path, cwd: Path) -> dict[str, list[float]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(kimigraph.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, cwd=cwd, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = (line.split() for line in ran.stdout.splitlines())
    return {name: [float(number) for number in rest] for name, *rest in rows}


@pytest.mark.parametrize("policy", ["article", "deepseek"])
def test_dumps_behind_the_pass_print_the_same(policy: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = replace(CONFIG, policy=policy)
    program = capture(load_source(str(ROOT / "examples" / "k31_tiny"), config), config)
    run_pipeline(program, default_pipeline(config), PassContext(config), [DumpPasses(tmp_path / "dumps")])
    paths = sorted((tmp_path / "dumps").glob("[0-9]*.py"))
    place = next(n for n, path in enumerate(paths) if path.stem.endswith("insert-quantization"))
    captured, quantised, last = (printed(paths[n], tmp_path) for n in (0, place, -1))
    assert captured.keys() == quantised.keys() == last.keys() and "cache.3.rope" in captured
    for name, (_, magnitude, _) in captured.items():
        limit = 1e-4 * quantised[name][1]
        assert last[name] == pytest.approx(quantised[name], rel=0, abs=limit), name
        if name.startswith("cache.3."):
            assert quantised[name][1] == pytest.approx(magnitude, rel=0.02) and quantised[name] != captured[name]
