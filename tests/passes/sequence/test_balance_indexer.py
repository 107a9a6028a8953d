"""``balance-indexer``: queries cross so that ranks score as many keys; test_share_tokens shows what they compute."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from sequence_on_ranks import captured, inputs_of, on_ranks

from kimigraph.ir.collectives import collectives
from kimigraph.ir.lock_step import run_ranks
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import Pipeline, run_pipeline
from kimigraph.passes.balance_indexer import BalanceIndexer
from kimigraph.passes.base import PassContext
from kimigraph.passes.prune_index_exchange import PruneIndexExchange
from kimigraph.passes.share_tokens import ShareTokens

PREFILL = {"phase": "prefill", "tokens": 16, "batch": 2}
INDEXER = OPERATORS["lightning_indexer"].overload


def keys_seen(program: CapturedProgram) -> list[int]:
    """What the queries of each rank see together, of all sequences."""
    graph = program.graph_module.graph
    indexers = [node for node in graph.nodes if node.target is INDEXER]
    graph.output_node().args = (tuple(node.args[3] for node in indexers),)
    program.graph_module.recompile()
    given = {"lengths": torch.tensor([0, 5], dtype=torch.int32)}
    ranks = [inputs_of(program, rank, **given) for rank in range(program.info["mesh"]["sp"])]
    queries = [node.meta["val"].shape[1] for node in indexers]
    return [
        sum(
            int(first) + more
            for firsts, many in zip(found, queries, strict=True)
            for first in firsts
            for more in range(many)
        )
        for found in run_ranks(program.graph_module, ranks, program.info["mesh"])
    ]


def stretch(ways: int, **options: Any) -> tuple[CapturedProgram, PassContext]:
    """The step of a stretch, up to this pass."""
    program, config = captured("kimi", True, stretch=True, **{**PREFILL, **options}, sp=ways)
    program, context = program.copy(), PassContext(replace(config, sp=ways))
    run_pipeline(program, Pipeline((ShareTokens(), PruneIndexExchange())), context, [])
    return program, context


@pytest.mark.parametrize("ways", [2, 4])
def test_ranks_score_as_many_keys(ways: int) -> None:
    program, context = stretch(ways)
    apart = keys_seen(program.copy())
    run_pipeline(program, Pipeline((BalanceIndexer(always=True),)), context, [])
    together = keys_seen(program)
    assert len(set(together)) == 1 and sum(together) == sum(apart)
    assert apart == sorted(apart) and apart[0] < together[0] < apart[-1]


def test_queries_cross_where_that_pays_alone() -> None:
    program, context = stretch(2)
    before = len(collectives(program.graph_module.graph))
    [record] = run_pipeline(program, Pipeline((BalanceIndexer(),)), context, [])
    [remark] = record.result.remarks
    assert remark.kind == "missed" and "would be saved" in remark.message and not record.result.modified
    [record] = run_pipeline(program, Pipeline((BalanceIndexer(always=True),)), context, [])
    [remark] = record.result.remarks
    assert remark.kind == "passed" and "1.50 times fewer keys" in remark.message
    assert len(collectives(program.graph_module.graph)) == before + 3
    batch, tokens, heads, width, k, words = 2, 8, 32, 16, 8, 4
    assert record.result.statistics["bytes_sent"] == batch * tokens * (heads * width + heads + k) * words // 2


def test_pieces_that_do_not_come_out_even_are_left(ways: int = 4) -> None:
    program, context = stretch(ways, tokens=12)
    [record] = run_pipeline(program, Pipeline((BalanceIndexer(always=True),)), context, [])
    assert not record.result.modified and "do not divide 3 queries" in record.result.remarks[0].message
    decoding, config = captured("kimi")
    shared = on_ranks(decoding, config, 2)  # a step of one token has no stretches
    assert [node.meta["val"].shape[1] for node in shared.graph_module.graph.nodes if node.target is INDEXER] == [1]
