"""A toy source in a working directory of the test's own, with a cache root of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kimigraph
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.report import CompileReport

TOY = """
import torch

class Toy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=False)

    def forward(self, x, cache):
        y = x @ self.weight
        cache["cache.0.sum"].add_(y.sum(0))
        return torch.topk(y, 2).values + 1.0

def build():
    return Toy(), (torch.ones(3, 4), {"cache.0.sum": torch.zeros(4)})
"""

KIMI: dict[str, Any] = {
    "model_type": "kimi_k31",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 3, "head_dim": 8},
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 8,
    "attn_res_block_size": 2,
    "intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": 16,
    "max_position_embeddings": 256,
    "random_weights": {"seed": 5},
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache-root"
    monkeypatch.setenv("KIMIGRAPH_CACHE_DIR", str(root))
    return root


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """SOURCE of the toy; its file is ``toy_source.py`` in the working directory."""
    (tmp_path / "toy_source.py").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_source", raising=False)
    return "toy_source:build"


@pytest.fixture
def kimi(tmp_path: Path) -> str:
    """SOURCE of a tiny model with one layer of each kind, its weights seeded with 5."""
    (tmp_path / "kimi").mkdir()
    (tmp_path / "kimi" / "config.json").write_text(json.dumps(KIMI))
    return str(tmp_path / "kimi")


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., CompileReport]:
    """``compiled(source, out=None, **config)`` for cpu:reference -> the report; ``.said`` holds the notifications."""

    def run(source: str, out: Path | None = None, **fields: Any) -> CompileReport:
        run.said = []  # the notifications of the last call
        config = CompileConfig(**{"target": "cpu:reference", **fields})
        return compile_source(source, [config], out or tmp_path / "out", run.said.append)[0]

    return run


@pytest.fixture
def python() -> Callable[..., str]:
    """``python(code, *arguments, **environment)`` in a process of its own -> what it printed."""

    def run(code: str, *arguments: Any, cwd: Path | None = None, **environment: str) -> str:
        root = str(Path(kimigraph.__file__).parent.parent)
        ran = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **environment},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    return run
