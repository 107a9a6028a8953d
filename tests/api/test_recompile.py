"""Recompile and compare: every test model, compiled by two processes that share nothing, gives the same bytes."""

import json
import runpy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

MODELS = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "fidelity_models.py"))

PROCESS = """
import json, sys
from pathlib import Path
import kimigraph.keys as keys
keys.compiler_hash = lambda: "a compiler"  # whatever somebody edits meanwhile
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
for number, (source, options) in enumerate(json.loads(sys.argv[1])):
    config = CompileConfig(random_weights=True, cache=sys.argv[2], **options)
    report = compile_source(source, [config], Path(sys.argv[3]) / str(number), lambda _: None)[0]
    print(json.dumps([report.cache["status"], report.cache["reason"], report.cache["key"], len(report.kernels)]))
"""


def written(directory: Path, documents: dict[str, dict[str, Any]]) -> dict[str, str]:
    """A directory with the configuration of each model."""
    for name, document in documents.items():
        (directory / name).mkdir(parents=True)
        (directory / name / "config.json").write_text(json.dumps(document))
    return {name: str(directory / name) for name in documents}


def check(
    tmp_path: Path, python: Callable[..., str], documents: dict[str, Any], options: Iterable[dict[str, Any]]
) -> None:
    """Compile all, then again in a process with another hash seed, folder and Triton cache, and compare."""
    sources = written(tmp_path / "models", documents)
    asked = json.dumps([[source, {"context": 64, **chosen}] for source in sources.values() for chosen in options])
    said: dict[str, list[list[Any]]] = {}
    for seed, mode in (("1", "use"), ("2", "check")):
        folder = tmp_path / mode
        folder.mkdir()
        text = python(
            PROCESS, asked, mode, folder, cwd=folder, PYTHONHASHSEED=seed, TRITON_CACHE_DIR=str(folder / "triton")
        )
        said[mode] = [json.loads(line) for line in text.splitlines() if line.startswith("[")]
    assert len(said["use"]) == len(json.loads(asked))
    for first, second in zip(said["use"], said["check"], strict=True):
        assert first[0] == "miss" and first[3] > 0
        assert second[:2] == ["bypass", "--cache check: equal to the stored entry"]
        assert second[2] == first[2]


def test_a_decode_step_of_k31(tmp_path: Path, python: Callable[..., str]) -> None:
    check(tmp_path, python, {"kimi_k31": MODELS["MODELS"]["kimi_k31"]}, [{"target": "cpu:reference"}])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_both_phases_of_every_model(tmp_path: Path, python: Callable[..., str]) -> None:
    assert {"kimi_k31", "kimi_linear", "deepseek_v32", "glm_moe_dsa", "glm5_next"} <= set(MODELS["MODELS"])
    reference = {"target": "cpu:reference"}
    options = [reference, {**reference, "batch": 2}, {**reference, "phase": "prefill", "tokens": 8}]
    check(tmp_path, python, MODELS["MODELS"], options)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_cubins_of_every_model(tmp_path: Path, python: Callable[..., str]) -> None:
    """Kernel sources and cubins, at head widths that the kernels are made for."""
    check(tmp_path, python, MODELS["MID_SIZE"], [{"target": "cuda:sm_90"}])
