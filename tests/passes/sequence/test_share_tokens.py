"""``share-tokens``: ranks that each take a stretch of a prefill's tokens compute what one does for all of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from sequence_on_ranks import assert_equal, both, captured, on_ranks

from kimigraph.capture import load_source
from kimigraph.capture.stretches import STRETCH, stretch_of
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError
from kimigraph.ir.operators import OPERATORS
from kimigraph.passes import Pipeline, run_pipeline
from kimigraph.passes.base import PassContext
from kimigraph.passes.share_tokens import ShareTokens

PREFILL = {"phase": "prefill", "tokens": 12, "batch": 3}
BEHIND = torch.tensor([0, 7, 10], dtype=torch.int32)
"""Tokens in front of the step, of each sequence."""
PAGES = {"cache_layout": "paged", "page_size": 4}


@pytest.mark.parametrize(
    ("model", "rows", "meshes", "options"),
    [
        pytest.param("kimi", False, ((4, 1), (2, 2)), {"tokens": 16}, id="kimi"),
        pytest.param("kimi", False, ((3, 1), (3, 2)), {"tokens": 18}, id="kimi-three", marks=pytest.mark.slow),
        pytest.param("kimi", True, ((3, 1),), {"tokens": 9}, id="continued-three", marks=pytest.mark.slow),
        pytest.param("kimi", True, ((2, 1),), {}, id="continued", marks=pytest.mark.slow),
        pytest.param("kimi", True, ((3, 1),), PAGES, id="pages", marks=pytest.mark.slow),
        pytest.param("deepseek", True, ((2, 1),), PAGES, id="deepseek"),
        pytest.param("deepseek", True, ((3, 1), (2, 2)), PAGES, id="deepseek-pages", marks=pytest.mark.slow),
    ],
)
def test_ranks_compute_what_one_does(
    model: str, rows: bool, meshes: tuple[tuple[int, int], ...], options: dict[str, Any]
) -> None:
    given = {"lengths": BEHIND} if rows else {}
    for sp, tp in meshes:
        asked = {**PREFILL, **options}
        program, _ = captured(model, rows, **asked, sp=sp if options else 1)
        stretch, config = captured(model, rows, stretch=True, **asked, sp=sp)
        shared = on_ranks(stretch, config, sp, tp)
        queries = [node.meta["val"].shape[1] for node in shared.graph_module.graph.nodes if is_indexer(node)]
        stretches = asked["tokens"] // sp  # pieces of all ranks, one of each, unless a stretch has too few tokens
        assert set(queries) == {stretches // sp if stretches % sp == 0 else stretches}
        names = assert_equal(both(program, shared, **given))
        assert len(names) > 4


def is_indexer(node: Any) -> bool:
    """Whether the node picks keys."""
    return node.target is OPERATORS["lightning_indexer"].overload


def test_what_crosses_ranks_is_of_fixed_size_but_for_cache_rows_and_results() -> None:
    stretch, config = captured("kimi", True, stretch=True, **PREFILL, sp=2)
    [record] = run_pipeline(stretch.copy(), Pipeline((ShareTokens(),)), PassContext(config), [])
    batch, heads, width, latent, rope, key, words = 3, 12, 4, 24, 4, 16, 4
    window = batch * 3 * heads * width * 3 * words
    states = batch * heads * 2 * width * width * words
    rows = batch * 6 * ((latent + rope + key) * words + 8)  # positions are int64
    logits = batch * 96 * words
    assert record.result.statistics["bytes_sent"] == window + states + rows + logits
    assert record.result.statistics["gathers"] == 7 and "6 of 12 tokens" in record.result.remarks[0].message


def test_who_takes_stretches() -> None:
    config = CompileConfig(target="cpu:reference", phase="prefill", batch=1, tokens=256, context=512, sp=2)
    source = load_source("examples/k31_tiny", config)
    assert stretch_of(source, config, 256) is not None and stretch_of(source, config, 257) is None
    for other in (replace(config, sp=1), replace(config, sp=3), replace(config, sp=2, pp=2)):
        assert stretch_of(source, other, 1) is None
    decode = replace(config, phase="decode", tokens=2)
    assert stretch_of(load_source("examples/k31_tiny", decode), decode, 1) is None


def test_a_state_that_takes_another_way_is_refused_with_the_remedy() -> None:
    stretch, config = captured("kimi", True, stretch=True, **PREFILL, sp=2)
    changed = stretch.copy()
    state = changed.placeholders["state_0_kda"]
    [output] = [node for node in changed.graph_module.graph.nodes if node.op == "output"]
    with changed.graph_module.graph.inserting_before(output):
        node = changed.graph_module.graph.call_function(torch.ops.aten.add_.Tensor, (state, 1))
    node.meta["val"] = state.meta["val"]
    with pytest.raises(CompileError, match=r"add_.*touches state_0_kda.*--disable-pass share-tokens"):
        on_ranks(changed, config, 2)
    whole, _ = captured("kimi", True, **PREFILL)
    [record] = run_pipeline(whole.copy(), Pipeline((ShareTokens(),)), PassContext(config), [])
    assert not record.result.modified and STRETCH not in whole.info
