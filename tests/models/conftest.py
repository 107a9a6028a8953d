import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kimigraph.models.kimi_k31 import KimiK31Config, KimiK31ForCausalLM, initialize

TINY = Path(__file__).parents[2] / "examples" / "k31_tiny" / "config.json"


@pytest.fixture(autouse=True)
def inference() -> Any:
    """No gradients, one thread, and the same random numbers for each test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny() -> dict[str, Any]:
    """The fields of examples/k31_tiny."""
    return json.loads(TINY.read_text())


@pytest.fixture
def configure(tiny: dict[str, Any]) -> Callable[..., KimiK31Config]:
    """The tiny configuration with fields set over it; ``linear`` sets fields of linear_attn_config."""

    def make(linear: dict[str, Any] | None = None, **fields: Any) -> KimiK31Config:
        return KimiK31Config.from_dict(
            tiny | fields | {"linear_attn_config": tiny["linear_attn_config"] | (linear or {})}
        )

    return make


@pytest.fixture
def build(configure: Callable[..., KimiK31Config]) -> Callable[..., KimiK31ForCausalLM]:
    """The seeded model of ``configure``'s configuration."""

    def make(**fields: Any) -> KimiK31ForCausalLM:
        model = KimiK31ForCausalLM(configure(**fields), device="meta")
        initialize(model, seed=0)
        return model

    return make
