"""Processes on two GPUs, over NCCL and in one another's memory: what they generate is what one generates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PROMPT = ",".join(str(3 + 7 * token % 251) for token in range(1032))
"""Two pieces of 512 tokens, whose stretches ranks share out (``share-tokens``), and one of 8, which is too short."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def generated(cache: Path, *options: str) -> list[list[int]]:
    """The tokens that ``kimigraph generate`` adds to each prompt."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KIMIGRAPH_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "kimigraph", "generate", str(ROOT / "examples" / "k31_tiny"), "--target", "cuda"]
    line += ["--max-new-tokens", "12", "--context", "2048", "--set", "num_hidden_layers=4", "--no-stop", "--json"]
    line += ["--max-batch", "1", "--prompt-ids", PROMPT, *options]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [completion["tokens"] for completion in json.loads(done.stdout)["completions"]]


@pytest.mark.parametrize(
    "mesh",
    [
        "--tp 2 --cuda-graph",
        "--sp 2 --cuda-graph",
        "--sp 2 --cache-layout paged",
        "--pp 2",
        f"--dp 2 --prompt-ids {PROMPT}",
    ],
    ids=["tp", "sp", "pages", "pp", "dp"],
)
def test_two_gpus_generate_what_one_does(mesh: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = tmp_path_factory.getbasetemp().parent / "programs"  # of all tests, which have those of one GPU in common
    [wanted] = generated(cache)
    found = generated(cache, *mesh.split())
    assert len(wanted) == 12 and found == [wanted] * len(found)
