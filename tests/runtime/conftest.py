"""A toy model with a cache, a counter and a result of every kind, captured and built once; caches of a test's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kimigraph.capture import capture_module
from kimigraph.codegen import build_artifact
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram


class Toy(nn.Module):
    """Scales a projection, adds its sum to a cache and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=False)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor, cache: dict[str, Tensor], scale: float = 2.0) -> dict[str, Any]:
        y = x @ self.weight * scale
        cache["cache.0.sum"].add_(y.sum(0))
        self.steps.add_(1)
        return {"y": y, "rest": (y.relu(), None, 7)}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture(scope="session")
def captured() -> CapturedProgram:
    example = (torch.randn(4, 4), {"cache.0.sum": torch.zeros(4)})
    return capture_module(Toy(), example, {}, CompileConfig())


@pytest.fixture(scope="session")
def built(captured: CapturedProgram, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("built") / "artifact"
    directory.mkdir()
    build_artifact(captured, "cpu:reference", directory)
    return directory


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache-root"
    monkeypatch.setenv("KIMIGRAPH_CACHE_DIR", str(root))
    return root
