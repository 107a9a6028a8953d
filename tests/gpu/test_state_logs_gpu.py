"""Generation with logged states on the GPU, steps as CUDA graphs: tokens are those of plain steps."""

from pathlib import Path

import pytest
import torch

from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.runtime.generation import Sampling

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "k31_tiny"
PROMPTS = [[5, 6, 7], [9] * 5, [3, 4, 8, 7], [1, 2]]
SAMPLINGS = [Sampling(max_new_tokens=count, stop_ids=()) for count in (30, 9, 22, 17)]


@pytest.mark.timeout(900)
def test_tokens_are_those_of_plain_steps(tmp_path, monkeypatch):
    """Four prompts in three slots: logs begin anew, wrap at different steps, and one graph takes all steps."""
    monkeypatch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    config = CompileConfig(target="cuda", context=64, overrides=(("num_hidden_layers", "4"),), cuda_graph=True)
    found = [
        Generator(EXAMPLE, config=config, max_batch=3, batches=(3,), chunks=(), state_log=length).generate(
            PROMPTS, SAMPLINGS
        )
        for length in (1, 4)
    ]
    assert found[0] == found[1]
