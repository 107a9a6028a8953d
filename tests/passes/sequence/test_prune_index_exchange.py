"""``prune-index-exchange``: ranks that share out a sequence compute what one does, whatever lies on which of them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from sequence_on_ranks import LAST_LENGTHS, assert_equal, both, captured, inputs_of, on_ranks, picks_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import infer
from kimigraph.ir.lock_step import run_ranks
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.reference.index_exchange import bytes_a_row
from kimigraph.passes import Pipeline, default_pipeline, run_pipeline
from kimigraph.passes.base import PassContext
from kimigraph.passes.prune_index_exchange import PruneIndexExchange
from kimigraph.passes.sharding.partial_sums import sum_behind
from kimigraph.session import pass_context

ALL_MESHES = ((2, 1), (3, 1), (4, 1), (2, 2))
"""Ranks that share out a sequence, and those that share out heads."""
PAGES = {"cache_layout": "paged", "page_size": 4}


@pytest.mark.parametrize(
    ("model", "rows", "meshes", "options"),
    [
        pytest.param("kimi", False, ALL_MESHES, {}, id="decode"),
        pytest.param("kimi", True, ((2, 1), (2, 2)), PAGES, id="pages"),
        pytest.param("kimi", True, ((3, 1), (4, 1)), PAGES, id="more-pages", marks=pytest.mark.slow),
        pytest.param("kimi", False, ALL_MESHES, {"phase": "prefill", "tokens": 8}, id="prefill"),
        pytest.param("deepseek", False, ((2, 1), (3, 2)), {}, id="deepseek"),
        pytest.param("shared", False, ((2, 2),), {}, id="shared-indexer", marks=pytest.mark.slow),
        pytest.param(
            "deepseek",
            False,
            ALL_MESHES,
            {"phase": "prefill", "tokens": 8},
            id="deepseek-prefill",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_compute_what_one_does(
    model: str, rows: bool, meshes: tuple[tuple[int, int], ...], options: dict[str, Any]
) -> None:
    lengths = {"lengths": LAST_LENGTHS} if model == "kimi" and "tokens" not in options else {}
    for sp, tp in meshes:
        program, config = captured(model, rows, sp=sp if options.get("cache_layout") == "paged" else 1, **options)
        shared = on_ranks(program, config, sp, tp, always=sp == 2)
        names = assert_equal(both(program, shared, steps=2 if lengths else 1, **lengths))
        assert any(name.endswith("index_key") for name in names) and len(names) > 4
        mesh = {"sp": sp, **({"tp": tp} if tp > 1 else {})}
        assert shared.info["mesh"] == mesh and [*mesh] == sorted(mesh)  # a manifest sorts names, outermost dims first


def test_each_query_sees_what_it_would_on_one_device() -> None:
    """Failure row I2: three queries of a sequence of ten tokens on four ranks, limits being those of the sequence."""
    program, config = captured("kimi", True, phase="prefill", tokens=3, batch=4)
    shared = on_ranks(program, config, 4)
    lengths = torch.tensor([7, 0, 10, 19], dtype=torch.int32)
    assert_equal(both(program, shared, lengths=lengths))
    one, many = picks_of(program.copy(), lengths=lengths), picks_of(shared, lengths=lengths)
    assert torch.equal(one, many) and [int((row >= 0).sum()) for row in many[1]] == [1, 2, 3]


def test_ties_are_decided_as_on_one_device_and_overflow_is_exact() -> None:
    program, config = captured("kimi")
    weights = next(spec for spec in program.inputs if spec.source.endswith("indexer.weights_proj.weight"))
    given = {weights.source: torch.zeros(weights.shape), "lengths": torch.full((12,), 23, dtype=torch.int32)}
    for sp, always in ((2, True), (3, True), (4, True), (2, False)):
        shared = on_ranks(program, config, sp, always=always)
        assert_equal(both(program, shared, **given))
        picks = picks_of(shared, **given)
        assert torch.equal(picks, picks_of(program.copy(), **given)) and picks[0, 0].tolist() == list(range(8))


def test_a_rank_without_picks_or_tokens_adds_nothing() -> None:
    """Failure row I8. Places that no token has taken hold no numbers, and all picks lie on the first rank."""
    program, config = captured("kimi")
    lengths = torch.arange(12, dtype=torch.int32) % 3  # with runs of 2 tokens on 4 ranks: only the first two have any
    given: dict[str, torch.Tensor] = {"lengths": lengths}
    for spec in program.inputs:
        if spec.source.startswith("cache."):
            values = torch.randn(spec.shape)
            taken = torch.arange(spec.shape[1]) < lengths.unsqueeze(1)
            given[spec.source] = torch.where(taken.unsqueeze(-1), values, math.nan)
    for sp in (2, 4):
        shared = on_ranks(program, config, sp, always=True)
        for name, one, many in both(program, shared, **given):
            if not name.startswith("cache."):
                assert one.isfinite().all()
            assert torch.allclose(one, many, atol=1e-4, equal_nan=True), name


@pytest.mark.parametrize("page_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 16))])
def test_pages_of_any_size(page_size: int) -> None:
    """Failure row I9."""
    program, config = captured("kimi", True, cache_layout="paged", page_size=page_size, sp=2, batch=4)
    shared = on_ranks(program, config, 2, always=True)
    latent = next(spec for spec in shared.inputs if spec.source == "cache.1.latent")
    assert latent.shape[1] == page_size and f"page_size={page_size}," in latent.descriptor
    assert_equal(both(program, shared, lengths=LAST_LENGTHS[4:8]))


@pytest.mark.parametrize("layout", [pytest.param("model", marks=pytest.mark.slow), "paged"])
def test_quantised_caches(layout: str) -> None:
    """Steps from empty caches: rows are put into their bytes by the rank that has them."""
    options: dict[str, Any] = {"policy": "deepseek", "cache_layout": layout, "page_size": 4, "sp": 2, "batch": 2}
    program, config = captured("kimi", True, until="share-tokens", **options)
    shared = on_ranks(program, config, 2, always=True)
    caches = {spec.source: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in program.inputs
              if spec.kind == "cache"}  # fmt: skip
    assert any(cache.dtype == torch.uint8 for cache in caches.values())
    one = [inputs_of(program, **caches)]
    many = [inputs_of(shared, rank, **caches) for rank in range(2)]
    ids, lengths = ([spec.source for spec in program.inputs].index(name) for name in ("input_ids", "lengths"))
    for step in range(12):
        for arguments in (*one, *many):
            arguments[ids].fill_(7 * step + 1)
            arguments[lengths].fill_(step)
        [(wanted,)] = run_ranks(program.graph_module, one)
        for (logits,) in run_ranks(shared.graph_module, many, shared.info["mesh"]):
            assert (logits - wanted).abs().max() <= 1e-4 * wanted.abs().max(), step


def test_a_second_step_with_fewer_tokens_is_as_fresh() -> None:
    """Failure row I11: nothing of the first step's exchange is left over in the second's."""
    program, config = captured("kimi")
    shared = on_ranks(program, config, 2, always=True)
    ranks = range(2)
    used = [inputs_of(shared, rank, lengths=LAST_LENGTHS) for rank in ranks]
    run_ranks(shared.graph_module, used, shared.info["mesh"])
    fewer = [inputs_of(shared, rank, lengths=LAST_LENGTHS // 4) for rank in ranks]
    again, fresh = (
        run_ranks(shared.graph_module, [[t.clone() for t in each] for each in fewer], shared.info["mesh"])
        for _ in range(2)
    )
    [wanted] = run_ranks(program.graph_module, [inputs_of(program, lengths=LAST_LENGTHS // 4)])
    assert torch.equal(again[1][0], fresh[0][0]) and torch.allclose(again[0][0], wanted[0], atol=1e-4)


@pytest.mark.parametrize(("ways", "least"), [(2, 1.3), (4, 2.4)])
def test_bytes_on_the_wire_are_told(ways: int, least: float) -> None:
    program, config = captured("kimi", batch=2, context=4096)
    shared = program.copy()
    [indexer] = [n for n in shared.graph_module.graph.nodes if n.target is OPERATORS["lightning_indexer"].overload]
    indexer.update_kwarg("k", 2048)
    infer(indexer)
    [record] = run_pipeline(shared, Pipeline((PruneIndexExchange(),)), PassContext(replace(config, sp=ways)), [])
    counts, [remark] = record.result.statistics, record.result.remarks
    assert counts["bytes_exchanged"] == 2 * bytes_a_row(2048, ways)["pruned"]
    assert counts["bytes_unpruned"] == 2 * ways * 2048 * 8 and counts["bytes_scores"] == 2 * 4096 * 4
    assert counts["bytes_unpruned"] / counts["bytes_exchanged"] >= least
    assert f"{counts['bytes_exchanged']:,} bytes a step" in remark.message and "on top" in remark.message
    heads, hidden, rows = 12, 48, 2  # the sum crosses where it is narrowest: behind the output projection
    assert counts["bytes_merged"] == 4 * rows * ways * (heads + hidden)


def test_few_picks_are_sent_as_they_are() -> None:
    program, config = captured("kimi")
    shared = program.copy()
    [record] = run_pipeline(shared, Pipeline((PruneIndexExchange(),)), PassContext(replace(config, sp=2)), [])
    [exchange] = [n for n in shared.graph_module.graph.nodes if n.target is OPERATORS["exchange_picks"].overload]
    assert exchange.kwargs["pruned"] is False and "these are all picks" in record.result.remarks[0].message
    assert record.result.statistics["bytes_exchanged"] == record.result.statistics["bytes_unpruned"]


def test_collectives_keep_their_order_and_stream_under_a_schedule() -> None:
    program, config = captured("kimi", force_streams=True)
    config = replace(config, sp=2)
    pipeline = default_pipeline(config)
    place = pipeline.names.index("prune-index-exchange")
    program = program.copy()
    run_pipeline(program, Pipeline(pipeline.passes[place : place + 1]), PassContext(config), [])

    def collectives() -> list[str]:
        return [n.name for n in program.graph_module.graph.nodes if communicates(n)]

    before = collectives()
    run_pipeline(program, Pipeline(pipeline.passes[place + 1 :]), pass_context(config), [])
    assert collectives() == before and len(before) == 5 and "exchange_picks" in before


def communicates(node: Node) -> bool:
    """Whether ranks meet in the node."""
    return "_c10d_functional" in str(node.target) or node.target is OPERATORS["exchange_picks"].overload


def test_what_cannot_be_shared_out_is_refused_with_the_place() -> None:
    program, config = captured("glm")
    with pytest.raises(CompileError, match=r"sp 2: .*leave out --sp"):
        on_ranks(program, config, 2)
    program, config = captured("kimi")
    with pytest.raises(CompileError, match=r"sp 5 does not divide the 24 tokens of cache.1.latent.*such as 320"):
        on_ranks(program, config, 5)
    with pytest.raises(CompileError, match=r"add_.*touches cache_1_latent.*not known to work on a part"):
        on_ranks(touched(program), config, 2)
    masked = program.copy()
    [indexer] = [n for n in masked.graph_module.graph.nodes if n.target is OPERATORS["lightning_indexer"].overload]
    with masked.graph_module.graph.inserting_before(indexer):
        mask = masked.graph_module.graph.call_function(
            torch.ops.aten.ones.default, ([1, 1, 24],), {"dtype": torch.bool, "device": torch.device("cpu")}
        )
    infer(mask)
    indexer.update_arg(4, mask)
    with pytest.raises(CompileError, match="hides keys by a mask"):
        on_ranks(masked, config, 2)


def touched(program: CapturedProgram) -> CapturedProgram:
    """The program with something else that writes a cache."""
    changed = program.copy()
    latent = changed.placeholders["cache_1_latent"]
    [output] = [node for node in changed.graph_module.graph.nodes if node.op == "output"]
    with changed.graph_module.graph.inserting_before(output):
        node = changed.graph_module.graph.call_function(torch.ops.aten.add_.Tensor, (latent, 1))
    node.meta["val"] = latent.meta["val"]
    return changed


def test_one_rank_changes_nothing() -> None:
    program, config = captured("kimi")
    [record] = run_pipeline(program.copy(), Pipeline((PruneIndexExchange(),)), PassContext(config), [])
    assert not record.result.modified


def test_a_sum_is_carried_to_where_it_is_narrowest_and_no_further() -> None:
    graph, module = Graph(), torch.nn.Module()
    x, narrow, wide, bias = (graph.placeholder(name) for name in ("x", "narrow", "wide", "bias"))
    mode = FakeTensorMode()
    for node, size in ((x, (2, 8)), (narrow, (3, 8)), (wide, (16, 3)), (bias, (16,))):
        with mode:
            node.meta["val"] = torch.empty(size)
    first = graph.call_function(torch.ops.aten.linear.default, (x, narrow))
    second = graph.call_function(torch.ops.aten.linear.default, (first, wide))
    last = graph.call_function(torch.ops.aten.add.Tensor, (second, bias))
    graph.output(last)
    for node in (first, second, last):
        infer(node)
    whole = sum_behind(x, "kimigraph.sp")
    assert whole.all_input_nodes[0].all_input_nodes == [first] and second.args[0] is whole
    assert [str(node.target) for node in GraphModule(module, graph).graph.nodes].count("aten.linear.default") == 2
