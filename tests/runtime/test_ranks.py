"""Processes over Gloo: programs of several ranks, and what happens when one of them fails."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kimigraph.cli.app import make_app
from kimigraph.runtime.parallel.launch import first_failure

ROOT = Path(__file__).parents[2]
MODEL: dict[str, Any] = {
    "model_type": "kimi_k31",
    "vocab_size": 96,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 12, "head_dim": 4},
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 8,
    "attn_res_block_size": 2,
    "intermediate_size": 96,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 24,
    "routed_expert_hidden_size": 16,
    "max_position_embeddings": 64,
    "random_weights": {"seed": 0},
}


def run(*command: str, cache: Path, module: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which finds this checkout and the module beside it."""
    paths = [str(ROOT), *([str(module)] if module else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "KIMIGRAPH_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    line = [sys.executable, *command]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=180, check=False)


def generate(source: Path, cache: Path, *options: str) -> dict[str, Any]:
    """The document of ``kimigraph generate --json``."""
    limits = ("--max-new-tokens", "6", "--context", "24")
    asked = ("generate", str(source), *limits, "--target", "cpu:reference", "--no-stop", "--json", *options)
    done = run("-m", "kimigraph", *asked, cache=cache)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


ONE = ("--prompt-ids", "7")
TWO = ("--prompt-ids", "1,2,3", *ONE)


def tokens(document: dict[str, Any]) -> list[list[int]]:
    """The tokens of all completions."""
    return [one["tokens"] for one in document["completions"]]


def model(directory: Path) -> Path:
    """The directory of a tiny model."""
    source = directory / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(MODEL))
    return source


def test_two_ranks_generate_what_one_does(tmp_path: Path) -> None:
    source, cache = model(tmp_path), tmp_path / "cache"
    one, two = generate(source, cache, *ONE), generate(source, cache, *ONE, "--tp", "2")
    assert tokens(two) == tokens(one) and len(tokens(one)[0]) == 6
    # Each program is in the cache once: rank 1 took what rank 0 had made.
    assert [program["cache"] for program in two["programs"]] == ["miss"] * len(two["programs"])
    listed = json.loads(run("-m", "kimigraph", "cache", "list", "--json", cache=cache).stdout)
    entries = listed if isinstance(listed, list) else listed["entries"]
    assert len(entries) == len(one["programs"]) + len(two["programs"])


@pytest.mark.slow
def test_drafts_on_two_ranks_change_nothing(tmp_path: Path) -> None:
    """Each rank verifies with its heads, and logs them; the model as its own draft is always right."""
    source, cache = model(tmp_path), tmp_path / "cache"
    found = generate(source, cache, *TWO, "--tp", "2", "--draft", str(source), "--draft-tokens", "2")
    assert tokens(found) == tokens(generate(source, cache, *TWO))
    told = found["speculation"]
    assert told["rounds"] > 0 and told["accepted"] == told["drafted"] > 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(), ("--tp", "2")], ids=["2x1", "2x2"])
def test_replicas_share_out_prompts(mesh: tuple[str, ...], tmp_path: Path) -> None:
    source, cache = model(tmp_path), tmp_path / "cache"
    assert tokens(generate(source, cache, *TWO, "--dp", "2", *mesh)) == tokens(generate(source, cache, *TWO))


def test_ranks_that_share_out_a_sequence_generate_what_one_does(tmp_path: Path) -> None:
    source, cache = model(tmp_path), tmp_path / "cache"
    assert tokens(generate(source, cache, *TWO, "--sp", "2")) == tokens(generate(source, cache, *TWO))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        "--sp 3",
        "--sp 4",
        "--sp 2 --tp 2",
        "--sp 2 --dp 2",
        "--sp 2 --cache-layout paged",
        "--sp 3 --cache-layout paged",
    ],
)
def test_a_sequence_on_any_mesh(mesh: str, tmp_path: Path) -> None:
    source, cache = model(tmp_path), tmp_path / "cache"
    assert tokens(generate(source, cache, *TWO, *mesh.split())) == tokens(generate(source, cache, *TWO))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["--sp 2", "--sp 2 --tp 2 --cache-layout paged"])
def test_drafts_over_a_sequence_on_several_ranks(mesh: str, tmp_path: Path) -> None:
    source, cache = model(tmp_path), tmp_path / "cache"
    drafts = ("--draft", str(source), "--draft-tokens", "3")
    found = generate(source, cache, *TWO, *drafts, *mesh.split())
    assert tokens(found) == tokens(generate(source, cache, *TWO))


@pytest.mark.slow
@pytest.mark.parametrize("ways", [3, 4])
def test_more_ranks_generate_what_one_does(ways: int, tmp_path: Path) -> None:
    source, cache = model(tmp_path), tmp_path / "cache"
    assert tokens(generate(source, cache, *TWO, "--tp", str(ways))) == tokens(generate(source, cache, *TWO))


FAILING = """
import os, signal, sys, time
import torch
from kimigraph.cli.errors import reports_errors
from kimigraph.ir.mesh import DeviceMesh
from kimigraph.runtime.parallel import first_then_others, join_ranks

def compiled(rank):
    def make():
        if sys.argv[1] == "compile" and rank == 0:
            raise ValueError("no such pass")
        return "program" if sys.argv[1] != "differ" else f"program of rank {rank}"
    return make

@reports_errors
def main():
    rank = join_ranks(DeviceMesh(tp=2), "cpu:reference")
    first_then_others(2, rank, compiled(rank), str)
    for step in range(10_000):
        if sys.argv[1] == "kill" and rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "raise" and rank == 1 and step == 3:
            raise ValueError("a wrong turn")
        torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", "kimigraph.tp"))
        time.sleep(0.01)

import click
try:
    main()
except (SystemExit, Exception) as error:
    sys.exit(getattr(error, "exit_code", 1))
"""
EXCHANGING = """
import torch
from kimigraph.ir.mesh import DeviceMesh
from kimigraph.ir.ranks import leave
from kimigraph.runtime.parallel import join_ranks
from kimigraph.ir.reference.collectives import over_group
from kimigraph.ir.reference.index_exchange import exchange, local_candidates
from kimigraph.ir.reference.sequence_shards import SequenceShards

ways = 2
rank, shards, every = join_ranks(DeviceMesh(sp=ways), "cpu:reference"), SequenceShards(ways, 4), torch.arange(300)
mine = every[shards.owner(every) == rank]
for k in (1, 8, 64):
    torch.manual_seed(k)
    for scores in (torch.randn(2, 300), torch.randint(0, 3, (2, 300)).float()):
        seen = torch.ones(2, len(mine), dtype=torch.bool)
        found = over_group(exchange(local_candidates(scores[:, mine], seen, mine, k), k, ways)).tokens
        best = sorted(sorted(range(300), key=lambda token: (-scores[0, token].item(), token))[:k])
        best = [token for token in best if shards.owner(token) == rank]
        assert found[0].tolist() == best + [-1] * (k - len(best)), (rank, k, found[0], best)
leave()
"""
LAUNCHING = """
import sys
from kimigraph.runtime.parallel.launch import RankFailedError, launch
try:
    launch(2, sys.argv[1:], module="failing")
except RankFailedError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("kill", r"rank 1 of 2 failed: Signal 9 (SIGKILL)"),
        pytest.param("raise", "rank 1 of 2 failed: ValueError", marks=pytest.mark.slow),
        pytest.param("compile", "rank 0 of 2 failed: ValueError", marks=pytest.mark.slow),
        pytest.param("differ", "rank 1 of 2 failed: rank 1 has the program", marks=pytest.mark.slow),
    ],
)
def test_one_that_fails_stops_all_and_is_named(how: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "launching.py").write_text(LAUNCHING)
    began = time.monotonic()
    done = run(str(tmp_path / "launching.py"), how, cache=tmp_path / "cache", module=tmp_path)
    assert done.stdout.startswith(told), done.stdout + done.stderr
    assert time.monotonic() - began < 60  # ten thousand steps take longer


def test_exchange_over_gloo(tmp_path: Path) -> None:
    (tmp_path / "exchanging.py").write_text(EXCHANGING)
    started = "from kimigraph.runtime.parallel.launch import launch; launch(2, [], module='exchanging')"
    done = run("-c", started, cache=tmp_path / "cache", module=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_first_failure_is_no_consequence_of_another() -> None:
    def failure(exitcode: int, message: Any, timestamp: int) -> Any:
        return SimpleNamespace(exitcode=exitcode, message=message, timestamp=timestamp)

    stopped, lost = failure(-15, "Signal 15", 1), failure(1, "Connection closed by peer", 1)
    killed, late = failure(-9, "Signal 9", 2), failure(1, {"message": "no such file"}, 3)
    assert first_failure({0: stopped, 1: lost, 2: killed, 3: late})[0] == 2
    assert first_failure({0: stopped, 1: lost, 3: late})[0] == 3
    assert first_failure({0: stopped, 1: lost})[0] == 1


def test_what_ranks_cannot_do_is_said_before_they_start(tmp_path: Path) -> None:
    source = model(tmp_path)
    for options, told in (
        (["--pp", "2", "--draft", "ngram"], "with --draft is not possible"),
        (["--cache", "off"], "take programs from the"),
    ):
        done = CliRunner().invoke(make_app(), ["generate", str(source), "--prompt-ids", "1", "--tp", "2", *options])
        assert done.exit_code == 2 and told in " ".join(done.output.split())
    wrong = ["compile", str(source), "--sp", "3", "--context", "32", "--target", "cpu:reference", "--cache", "off"]
    done = CliRunner().invoke(make_app(), wrong)
    assert done.exit_code == 2 and "sp 3 does not divide the 32 tokens" in " ".join(done.output.split())


def test_the_interpreter_does_not_share_out_sequences(tmp_path: Path) -> None:
    """In a process of its own: the target is refused where Triton was imported without its interpreter, too."""
    asked = ["-m", "kimigraph", "compile", str(model(tmp_path)), "--sp", "2", "--target", "cpu"]
    done = run(*asked, cache=tmp_path / "cache", module=tmp_path)
    assert done.returncode == 2 and "cannot exchange picks; cpu:reference can" in " ".join(done.stderr.split())
