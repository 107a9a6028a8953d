"""Processes on two GPUs, over NCCL and in one another's memory: what they generate is what one generates."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROMPTS = ("--prompt-ids", ",".join(str(3 + 7 * token % 251) for token in range(600)), "--prompt-ids", "5,6,7")
"""One whose stretches ranks share out (``share-tokens``), and one that is shorter than that."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def generated(cache: Path, *options: str) -> dict[str, Any]:
    """The document of ``kimigraph generate --json`` of a process of its own, from the first token on."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KIMIGRAPH_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "kimigraph", "generate", str(ROOT / "examples" / "k31_tiny"), "--target", "cuda"]
    line += ["--max-new-tokens", "12", "--context", "1024", "--set", "num_hidden_layers=4", "--no-stop", "--json"]
    done = subprocess.run(
        [*line, *PROMPTS, *options], capture_output=True, text=True, env=environment, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "mesh",
    [
        "--tp 2",
        "--sp 2",
        "--dp 2",
        "--pp 2",
        "--pp 2 --micro-batches 2",
        "--tp 2 --cuda-graph",
        "--sp 2 --cuda-graph --cache-layout paged",
        "--tp 2 --draft ngram",
    ],
)
def test_two_gpus_generate_what_one_does(mesh: str, tmp_path: Path) -> None:
    one, two = generated(tmp_path), generated(tmp_path, *mesh.split())
    tokens = [[completion["tokens"] for completion in found["completions"]] for found in (one, two)]
    assert tokens[1] == tokens[0] and all(len(found) == 12 for found in tokens[0])
