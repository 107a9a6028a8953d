"""Generation whose recurrent states are written with every few tokens: tokens are those of plain steps."""

from collections.abc import Generator as Generating
from pathlib import Path
from typing import Any

import pytest
import torch

from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.descriptors import ConvDescriptor, StateDescriptor
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.generation import Completion, Sampling
from kimigraph.runtime.speculation import StateShape
from kimigraph.state_logs import LENGTH, log_length, log_rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "k31_tiny"
LAYERS = (("num_hidden_layers", "4"),)
PROMPTS = [[5, 6, 7], [9] * 11, [3, 4, 8, 7, 6, 5, 4, 3, 2, 1, 50, 51, 52, 53], [1, 2], [8, 8, 9]]
SAMPLINGS = [Sampling(max_new_tokens=count, stop_ids=()) for count in (14, 5, 9, 12, 7)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Generating[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def made(length: int, **layout: Any) -> Generator:
    config = CompileConfig(target="cpu:reference", context=48, overrides=LAYERS, **layout)
    return Generator(
        EXAMPLE, config=config, max_batch=3, batches=(1, 3), chunks=(8,), state_log=length, debug=bool(layout)
    )


@pytest.fixture(scope="module")
def plain(cache: None) -> list[Completion]:
    return made(1).generate(PROMPTS, SAMPLINGS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout",
    [{}, pytest.param({"cache_layout": "paged", "page_size": 8}, marks=pytest.mark.slow)],
    ids=["model", "paged"],
)
def test_tokens_are_those_of_plain_steps(plain: list[Completion], layout: dict[str, Any]) -> None:
    """Five prompts of other lengths in three slots: slots are used again, and the last sequence moves to the first."""
    generator = made(4, **layout)
    assert generator.generate(PROMPTS, SAMPLINGS) == plain
    assert generator.engine.slots.first(3)["log.filled"].any(), "logs have something in them at the end"
    assert generator.generate(PROMPTS, SAMPLINGS) == plain


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fork_takes_its_log_along_and_an_aborted_one_leaves_none(plain: list[Completion]) -> None:
    generator = made(4)
    first, second = (generator.submit(PROMPTS[place], SAMPLINGS[place]) for place in (0, 1))
    tokens: dict[int, list[int]] = {first: [], second: []}
    fork = None
    while generator.engine.busy:
        for event in generator.step():
            if event.token is not None:
                tokens[event.number].append(event.token)
        if fork is None and len(tokens[first]) == 7:
            fork = generator.fork(first)
            tokens[fork] = list(tokens[first])
            generator.abort(second)
            third = generator.submit(PROMPTS[3], SAMPLINGS[3])
            tokens[third] = []
    assert tuple(tokens[first]) == tuple(tokens[fork]) == plain[0].tokens
    assert tuple(tokens[third]) == plain[3].tokens


def shape(heads: int = 32) -> StateShape:
    state, conv = StateDescriptor("vk", "float32", heads, 128, 128), ConvDescriptor(3 * heads * 128, 4, 3)
    return StateShape(("0", "1"), state, conv, torch.bfloat16)


def test_the_cost_model_says_where_logs_pay() -> None:
    config = CompileConfig(target="cuda")
    lengths = {rows: log_length(None, shape(), rows, config, "cuda", False) for rows in (1, 8, 16, 32, 256)}
    assert lengths == {1: 1, 8: 1, 16: 1, 32: LENGTH, 256: LENGTH}
    assert log_length(None, shape(), 256, config, "cpu:reference", False) == 1
    assert log_length(None, shape(), 256, config, "cuda", True) == 1
    assert log_length(None, None, 256, config, "cuda", False) == 1
    assert log_length(16, shape(), 1, config, "cpu:reference", False) == 16


def test_logs_beside_drafts_or_of_no_token_are_refused() -> None:
    config = CompileConfig()
    with pytest.raises(UsageError, match="state_log 4 with drafts"):
        log_length(4, shape(), 8, config, "cuda", True)
    with pytest.raises(UsageError, match="state_log is 0"):
        log_length(0, shape(), 8, config, "cuda", False)


def test_a_log_is_less_than_a_fifth_of_the_state() -> None:
    rows = log_rows(shape(), LENGTH)
    assert rows["log.1.keys"].shape == (LENGTH, 32, 128) and len(rows) == 7
    log = sum(torch.Size(row.shape).numel() * row.dtype.itemsize for row in rows.values())
    assert log < 2 * 32 * 128 * 128 * 4 / 5
    assert log_rows(shape(), 1) == {}
