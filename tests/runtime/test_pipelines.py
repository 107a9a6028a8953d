"""Pipelines over Gloo, from the command line: tokens, checksums and caches of stages are those of one process."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kimigraph import Generator, Sampling
from kimigraph.capture import load_source
from kimigraph.cli.app import make_app
from kimigraph.compiler import compile_model
from kimigraph.ir.config import CompileConfig

ROOT = Path(__file__).parents[2]
MODEL: dict[str, Any] = {
    "model_type": "kimi_k31",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 4, "head_dim": 4},
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 4,
    "attn_res_block_size": 2,
    "intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 8,
    "routed_expert_hidden_size": 16,
    "max_position_embeddings": 64,
    "random_weights": {"seed": 0},
}
LONGER = {
    **MODEL,
    "num_hidden_layers": 3,
    "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 4, "head_dim": 4},
}
PROMPTS = ([1, 2, 3], [7])
CONFIG = CompileConfig(target="cpu:reference", context=16)
SIZES = ("--target", "cpu:reference", "--context", "16")


def run(*command: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which finds this checkout."""
    own = {"PYTHONPATH": str(ROOT), "KIMIGRAPH_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", *command]
    return subprocess.run(
        line, capture_output=True, text=True, env={**os.environ, **own}, timeout=180, check=False, cwd=cache.parent
    )


def generate(source: Path, cache: Path, *options: str, prompts: Sequence[list[int]] = PROMPTS) -> dict[str, Any]:
    """The document of ``kimigraph generate --json``."""
    asked = [part for prompt in prompts for part in ("--prompt-ids", ",".join(map(str, prompt)))]
    limits = ("--max-new-tokens", "6", "--no-stop", "--json")
    done = run("kimigraph", "generate", str(source), *asked, *SIZES, *limits, *options, cache=cache)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def model(directory: Path, document: dict[str, Any]) -> Path:
    """The directory of a tiny model in ``directory``; ``cache`` beside it is the compile cache."""
    source = directory / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(document))
    return source


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("pipelines"), LONGER)


def in_one_process(source: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """What one process generates."""
    config = replace(CONFIG, cache="off")
    generator = Generator(source, config=config, max_batch=len(prompts), batches=(1, len(prompts)), chunks=())
    made = generator.generate(prompts, Sampling(max_new_tokens=6, stop_ids=()))
    return [list(each.tokens) for each in made]


def made_by(document: dict[str, Any]) -> list[list[int]]:
    return [one["tokens"] for one in document["completions"]]


def test_two_stages_generate_what_one_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first finds its program in the cache, the second has to compile: they agree on it before either runs."""
    source, cache = model(tmp_path, MODEL), tmp_path / "cache"
    monkeypatch.setenv("KIMIGRAPH_CACHE_DIR", str(cache))
    first = replace(CONFIG, batch=1, tokens=1, pp=2, stage=0)
    step = load_source(str(source), first, rows=True)
    compile_model(str(source), step, first, source.parent / "first", lambda message: None)
    two = generate(source, cache, "--pp", "2", prompts=PROMPTS[1:])
    assert made_by(two) == in_one_process(source, PROMPTS[1:]) and len(made_by(two)[0]) == 6
    assert [program["cache"] for program in two["programs"]] == ["hit"]  # of the first stage, which prints


@pytest.fixture(scope="module")
def tokens(source: Path) -> list[list[int]]:
    """What one process generates for both prompts."""
    return in_one_process(source, PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "--pp 2 --micro-batches 2",
        "--pp 3",
        "--pp 2 --tp 2",
        "--pp 2 --dp 2",
        "--pp 2 --cache-layout paged",
        "--pp 2 --tp 2 --micro-batches 2",
        "--pp 2 --sp 2",
    ],
)
def test_meshes_with_stages_generate_what_one_process_does(mesh: str, source: Path, tokens: list[list[int]]) -> None:
    assert made_by(generate(source, source.parent / "cache", *mesh.split())) == tokens


@pytest.mark.slow
def test_an_artifact_for_each_stage_runs_under_torchrun_and_alone(source: Path, tmp_path: Path) -> None:
    cache, sizes = tmp_path / "cache", ("--batch", "2", *SIZES)
    for options in (("--out", "one"), ("--pp", "2", "--out", "two")):
        done = run("kimigraph", "compile", str(source), *sizes, *options, "--no-report", cache=cache)
        assert done.returncode == 0, done.stderr
    ranks = ("torch.distributed.run", "--nproc-per-node", "2", "-m")
    found = [
        json.loads(run(*start, "kimigraph", "run", directory, "--json", cache=cache).stdout)
        for start, directory in (((), "one"), ((), "two"), (ranks, "two"))
    ]
    one, alone, several = (each["outputs"] for each in found)
    assert all(each["passed"] for each in found) and one.keys() == alone.keys() == several.keys()
    for name, sums in one.items():
        assert alone[name] == pytest.approx(sums, rel=1e-4, abs=1e-4), name
        assert several[name] == pytest.approx(sums, rel=1e-4, abs=1e-4), name


def test_what_a_pipeline_cannot_do_is_said_before_it_starts(source: Path) -> None:
    for options, told in (
        (["--pp", "2", "--draft", "ngram"], "--pp 2 with --draft"),
        (["--micro-batches", "2"], "parts of a step follow one another through stages"),
    ):
        asked = ["generate", str(source), "--prompt-ids", "1", *SIZES, *options]
        done = CliRunner().invoke(make_app(), asked)
        assert done.exit_code == 2 and told in " ".join(done.output.split()), done.output
    for options, told in (
        (["--pp", "2", "--verify"], "pp 2 with --verify"),
        (["--pp", "2", "--check-numerics"], "pp 2 with --check-numerics"),
        (["--pp", "2", "-O", "0"], "needs the pass split-stages"),
        (["--pp", "2", "--disable-pass", "split-stages"], "needs the pass split-stages"),
    ):
        done = CliRunner().invoke(make_app(), ["compile", str(source), *SIZES, *options])
        assert done.exit_code == 2 and told in " ".join(done.output.split()), done.output
