"""Whole models on a GPU: bf16 beside the models themselves, and caches in pages."""

import importlib
import json
import random
import sys
from collections.abc import Generator as Generating
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.generation import PagedSlots, Sampling

pytestmark = pytest.mark.gpu
SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def fidelity(tmp_path_factory: pytest.TempPathFactory) -> Generating[ModuleType]:
    """scripts/fidelity_device.py, with a compile cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
        yield importlib.import_module("fidelity_device")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "chunks", "options"),
    [
        ("kimi_k31", (), {}),
        ("kimi_k3", (), {"cache_layout": "paged"}),
        ("kimi_linear", (16,), {}),
        ("deepseek_v32", (), {}),
        ("glm_moe_dsa", (), {"cache_layout": "paged", "cuda_graph": True}),
        ("glm5_next", (), {}),
    ],
)
def test_the_error_of_bf16_is_about_that_of_the_model_in_bf16(
    fidelity: ModuleType, family: str, chunks: tuple[int, ...], options: dict[str, object]
) -> None:
    try:
        rows = [fidelity.compared(family, "mid", seed, 32, chunks=chunks, **options) for seed in range(3)]
    except UsageError as error:
        if "transformers" in str(error):
            pytest.skip(str(error))
        raise
    [ratio] = fidelity.within(rows).values()
    assert ratio <= fidelity.ALLOWED, json.dumps(rows)


@pytest.mark.timeout(300)
def test_neither_places_of_pages_nor_what_ran_before_change_a_bit(fidelity: ModuleType, tmp_path: Path) -> None:
    fidelity.write_checkpoint("kimi_k31", "mid", 0, tmp_path)
    config = CompileConfig(target="cuda", dtype="bfloat16", context=96, cache_layout="paged", page_size=16)
    generator = Generator(tmp_path, config=config, max_batch=2, batches=(1,), chunks=(), debug=True)
    slots = generator.engine.slots
    assert isinstance(slots, PagedSlots)
    prompt, draw = [7 + place for place in range(40)], random.Random(5)

    def logits() -> torch.Tensor:
        found, _ = fidelity.generated(generator, [[token] for token in prompt])
        slots.abandon()
        return torch.stack(found)

    first = logits()
    assert first.isfinite().all()
    for _ in range(3):
        generator.generate([[3] * draw.randint(1, 30)])  # leaves states and pages behind
        kept = slots.cache.new_table()  # and a page taken moves all others
        slots.cache.reserve({kept: 16 * draw.randint(1, 3)})
        assert torch.equal(logits(), first)
        slots.cache.free(kept)


@pytest.mark.timeout(300)
def test_pieces_of_prompts_in_graphs_give_the_bits_of_those_without(fidelity: ModuleType, tmp_path: Path) -> None:
    """The second piece of a size is captured and replayed, also behind other tokens and in another slot."""
    fidelity.write_checkpoint("kimi_k31", "mid", 0, tmp_path)
    prompts = [[7 + place for place in range(length)] for length in (53, 37, 45)]
    tokens: list[list[list[int]]] = []
    for cuda_graph in (False, True):
        config = CompileConfig(target="cuda", dtype="bfloat16", context=96, cuda_graph=cuda_graph)
        generator = Generator(tmp_path, config=config, max_batch=2, batches=(2,), chunks=(16, 4))
        completions = generator.generate(prompts, Sampling(max_new_tokens=8))
        tokens.append([one.tokens for one in completions])
    assert tokens[0] == tokens[1] and all(len(found) == 8 for found in tokens[0])
    graphs = generator.programs.graphs
    assert graphs is not None and graphs.captured == 4  # pieces of 16, 4 and 1, and the step of two
