"""``shard``: what several ranks compute is what one computes, to fp32 tolerance, for every family and phase."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_models import DEEPSEEK, GLM, KIMI
from torch.fx import Node

from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError, UsageError
from kimigraph.ir.launches import launches_of
from kimigraph.ir.lifetimes import new_tensors
from kimigraph.ir.lock_step import run_ranks
from kimigraph.ir.mesh import DeviceMesh
from kimigraph.ir.own_rows import OWN_ROWS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.purity import storage_root
from kimigraph.ir.ranks import neighbours
from kimigraph.ir.schedule import stream_of
from kimigraph.ir.script import make_inputs
from kimigraph.ir.shares import Share
from kimigraph.ir.verifier import verify
from kimigraph.passes import Pipeline, default_pipeline, run_pipeline
from kimigraph.passes.base import PassContext
from kimigraph.passes.raise_moe import RaiseMoe
from kimigraph.passes.shard import Shard
from kimigraph.passes.sharding.placement import NotCarried
from kimigraph.passes.sharding.plan import require_divisible, share_of
from kimigraph.passes.sharding.views import viewed
from kimigraph.passes.share_indexer_rows import ShareIndexerRows
from kimigraph.session import pass_context

ALL_ROWS = ShareIndexerRows(least_saved_us=-1.0)
"""What a tiny indexer saves is less than its picks take."""


def captured(
    document: dict[str, Any], phase: Any, directory: Path, rows: bool = False, **options: Any
) -> tuple[CapturedProgram, CompileConfig]:
    """The step of a model of that configuration, up to where ``shard`` stands."""
    (directory / "config.json").write_text(json.dumps(document))
    tokens = {"prefill": 8, "verify": 4}.get(phase, 1)
    asked = {"batch": 12, "tokens": tokens, **options}
    config = CompileConfig(target="cpu:reference", phase=phase, context=24, tp=2, **asked)
    program = capture(load_source(str(directory), config, rows=rows), config)
    pipeline = default_pipeline(config)
    before = pipeline.names.index("shard")
    run_pipeline(program, Pipeline(pipeline.passes[:before]), PassContext(replace(config, tp=1)), [])
    return program, config


def whole_and_shared(program: CapturedProgram, config: CompileConfig, ways: int) -> Iterator[tuple[str, Any, Any]]:
    """Name, value of one rank and value of ``ways`` ranks of every output and updated input."""
    shared = program.copy()
    passes = Pipeline((Shard(), ALL_ROWS))
    record, rows = run_pipeline(shared, passes, PassContext(replace(config, tp=ways)), [])
    assert record.result.statistics["gathered_for_unknown"] == 0, record.result.remarks
    assert rows.result.statistics["shared"] == len(rows.result.remarks) > 0, rows.result.remarks
    verify(shared)
    one = [make_inputs(program.inputs, constants_of(program), 3)]
    many = [make_inputs(shared.inputs, constants_of(program), 3, rank=rank) for rank in range(ways)]
    [wanted] = run_ranks(program.graph_module, one)
    results = run_ranks(shared.graph_module, many)
    for rank in range(ways):
        assert all(map(torch.equal, results[rank], results[0])), "ranks differ in what they return"
    yield from zip([spec.name for spec in program.outputs], wanted, results[0], strict=True)
    for place, spec in enumerate(shared.inputs):
        if spec.mutated:
            parts = [arguments[place] for arguments in many]
            if spec.shared is None:
                assert all(torch.equal(part, parts[0]) for part in parts), f"ranks differ in {spec.source}"
            yield spec.source, one[0][place], parts[0] if spec.shared is None else spec.shared.join(parts)


def constants_of(program: CapturedProgram) -> dict[str, torch.Tensor]:
    """The constants by source name."""
    return {spec.source: program.tensors[spec.name] for spec in program.inputs if spec.kind == "constant"}


@pytest.mark.parametrize(
    ("document", "phase"),
    [
        pytest.param(KIMI, "decode", id="kimi_k31-decode"),
        pytest.param(KIMI, "prefill", id="kimi_k31-prefill"),
        pytest.param(KIMI, "verify", id="kimi_k31-verify"),
        pytest.param(DEEPSEEK, "decode", id="deepseek_v32-decode"),
        pytest.param(GLM, "decode", id="glm5_next-decode"),
        pytest.param(DEEPSEEK, "prefill", id="deepseek_v32-prefill", marks=pytest.mark.slow),
        pytest.param(GLM, "prefill", id="glm5_next-prefill", marks=pytest.mark.slow),
    ],
)
def test_ranks_compute_what_one_does(document: dict[str, Any], phase: str, tmp_path: Path) -> None:
    program, config = captured(document, phase, tmp_path)
    for ways in (2, 3, 4):
        names = set[str]()
        for name, one, many in whole_and_shared(program, config, ways):
            names.add(name)
            if one.is_floating_point():
                assert (one - many).abs().max() <= 1e-4 * max(one.abs().max(), 1e-6), (name, ways)
            else:
                assert torch.equal(one, many), (name, ways)
        assert len(names) > 2


@pytest.mark.parametrize(("batch", "tokens", "ways"), [(3, 8, 2), (1, 18, 3)])
def test_ranks_do_early_and_late_queries_of_sequences_that_they_do_not_divide(
    batch: int, tokens: int, ways: int, tmp_path: Path
) -> None:
    program, config = captured(KIMI, "prefill", tmp_path, rows=True, batch=batch, tokens=tokens)
    for name, one, many in whole_and_shared(program, config, ways):
        assert (one.float() - many.float()).abs().max() <= 1e-4 * max(float(one.abs().max()), 1e-6), name
    run_pipeline(program, Pipeline((Shard(), ALL_ROWS)), PassContext(replace(config, tp=ways)), [])
    indexers = [node for node in program.graph_module.graph.nodes if "lightning_indexer" in str(node.target)]
    assert [node.meta["val"].shape[:2] for node in indexers] == [(batch, tokens // (2 * ways))] * 2


def test_a_rank_has_its_part_of_the_weights_and_what_is_replicated(tmp_path: Path) -> None:
    program, config = captured(KIMI, "decode", tmp_path)
    whole = {spec.source: torch.Size(spec.shape).numel() for spec in program.inputs if spec.kind == "weight"}
    run_pipeline(program, Pipeline((Shard(),)), PassContext(replace(config, tp=4)), [])
    for spec in program.inputs:
        if spec.kind == "weight":
            assert spec.whole_shape == spec.shape or spec.shared is not None
            assert torch.Size(spec.shape).numel() * (4 if spec.shared else 1) == whole[spec.source], spec.source
    replicated = {spec.source for spec in program.inputs if spec.kind == "weight" and not spec.share}
    kept = ("norm", "res_", "indexer.", "q_a_proj", "kv_a_proj", "f_a_proj", "gate.", "routed_expert_")
    assert all(any(word in source for word in kept) for source in replicated), replicated
    states = {spec.source: spec for spec in program.inputs if spec.kind == "cache"}
    assert "heads=3" in states["state.0.kda"].descriptor and "channels=36" in states["state.0.conv"].descriptor
    assert states["cache.1.index_key"].share is None and states["cache.1.latent"].share is None


def test_collectives_of_a_step_are_few(tmp_path: Path) -> None:
    program, config = captured(KIMI, "decode", tmp_path)
    [record] = run_pipeline(program, Pipeline((Shard(),)), PassContext(config), [])
    counts = record.result.statistics
    # Two attentions, a dense MLP, and one for routed and shared experts together.
    assert counts["all_reduces"] == 4 and counts["joined_sums"] == 1
    assert counts["all_gathers"] == 2  # embeddings and logits
    sums, hidden, latent = 12 * 4, 48, 16  # twelve rows in fp32: sums cross twice, by halves; gathers once, by halves
    assert counts["bytes_sent"] == sums * (4 * hidden + latent) + sums * (hidden + 96) // 2
    assert "1/2 of theirs" in record.result.remarks[0].message


def test_what_is_gathered_lies_where_nothing_else_does(tmp_path: Path) -> None:
    program, config = captured(KIMI, "decode", tmp_path)
    run_pipeline(program, Pipeline((Shard(),)), PassContext(config), [])
    graph = program.graph_module.graph
    gathered = {node.all_input_nodes[0] for node in graph.nodes if "all_gather" in str(node.target)}
    kept = {tensor.maker: tensor.kept for tensor in new_tensors(graph)}
    assert gathered and all("until its wait" in kept[node] for node in gathered)


def test_an_indexer_is_shared_by_sequences_where_that_pays(tmp_path: Path) -> None:
    program, config = captured(KIMI, "decode", tmp_path)
    passes = Pipeline((Shard(), ShareIndexerRows()))
    _, record = run_pipeline(program.copy(), passes, PassContext(config), [])
    assert record.result.statistics["shared"] == 0 and "a gather takes" in record.result.remarks[0].message
    shared = program.copy()
    run_pipeline(shared, Pipeline((Shard(), ALL_ROWS)), PassContext(config), [])
    [indexer] = [node for node in shared.graph_module.graph.nodes if "lightning_indexer" in str(node.target)]
    assert indexer.meta["val"].shape == (6, 1, 8)
    keys = indexer.args[1]
    assert isinstance(keys, Node) and keys.target is OWN_ROWS and launches_of(keys) == 0
    assert storage_root(keys) is shared.placeholders["cache_1_index_key"]


@pytest.mark.parametrize("page_size", [8, 16])
def test_pages_of_any_size_are_found_by_every_rank(page_size: int, tmp_path: Path) -> None:
    program, config = captured(KIMI, "decode", tmp_path, rows=True, cache_layout="paged", page_size=page_size)
    assert any(spec.source == "block_table" for spec in program.inputs)
    for name, one, many in whole_and_shared(program, config, 2):
        assert (one.float() - many.float()).abs().max() <= 1e-4 * max(float(one.abs().max()), 1e-6), name


def test_collectives_keep_their_order_and_stream_under_a_schedule(tmp_path: Path) -> None:
    program, config = captured(KIMI, "decode", tmp_path, force_streams=True)
    pipeline = default_pipeline(config)
    first = pipeline.names.index("shard")
    run_pipeline(program, Pipeline((pipeline.passes[first],)), PassContext(config), [])

    def collectives() -> list[str]:
        return [node.name for node in program.graph_module.graph.nodes if "_c10d_functional" in str(node.target)]

    before = collectives()
    run_pipeline(program, Pipeline(pipeline.passes[first + 1 :]), pass_context(config), [])
    assert collectives() == before
    streams = {node: stream_of(node) for node in program.graph_module.graph.nodes}
    assert max(streams.values()) > 0
    assert all(not stream for node, stream in streams.items() if "_c10d_functional" in str(node.target))


def test_one_rank_changes_nothing(tmp_path: Path) -> None:
    program, config = captured(KIMI, "decode", tmp_path)
    [record] = run_pipeline(program, Pipeline((Shard(),)), PassContext(replace(config, tp=1)), [])
    assert not record.result.modified and all(spec.share is None for spec in program.inputs)


def test_experts_that_hold_what_follows_their_sum_are_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI))
    config = CompileConfig(target="cpu:reference", batch=2, context=24, tp=2)
    program = capture(load_source(str(tmp_path), config), config)
    pipeline = default_pipeline(config)
    early = pipeline.passes[: pipeline.names.index("shard")]
    merged = tuple(RaiseMoe() if item.name == "raise-moe" else item for item in early)
    run_pipeline(program, Pipeline(merged), PassContext(config), [])
    [record] = run_pipeline(program, Pipeline((Shard(),)), PassContext(config), [])
    assert any("raise-moe{tail-tokens=0}" in remark.message for remark in record.result.remarks)


def test_sizes_that_do_not_divide_name_the_possible_ones() -> None:
    with pytest.raises(UsageError, match=r"tp 5 does not divide heads of MLA \(12\).*tp 1, 2, 3, 4, 6, 12"):
        require_divisible({**KIMI, "moe_intermediate_size": 24, "hidden_size": 48}, 5)
    require_divisible(KIMI, 12)
    require_divisible(GLM, 4)
    require_divisible({**KIMI, "overrides": [["num_attention_heads", "10"]]}, 2)
    with pytest.raises(UsageError, match=r"heads of MLA \(10\)"):
        require_divisible({**KIMI, "overrides": [["num_attention_heads", "10"]]}, 4)
    with pytest.raises(UsageError, match=r"3 blocks of 8.*possible here: 1, 2, 4, 8"):
        share_of("model.layers.0.self_attn.conv1d.weight", (24, 1, 4), 3)


def test_a_state_that_cannot_be_written_in_shares_is_an_error(tmp_path: Path) -> None:
    program, config = captured(KIMI, "decode", tmp_path)
    graph = program.graph_module.graph
    state = program.placeholders["state_0_kda"]
    output = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(output):
        written = graph.call_function(torch.ops.aten.flip.default, (state, [1]))
        written.meta["val"] = state.meta["val"]
        copied = graph.call_function(torch.ops.aten.copy_.default, (state, written))
        copied.meta["val"] = state.meta["val"]
    with pytest.raises(CompileError, match="writes state_0_kda, of which each rank has a share"):
        run_pipeline(program, Pipeline((Shard(),)), PassContext(config), [])


@pytest.mark.parametrize(
    ("before", "after", "dim", "moved"),
    [
        ((2, 1, 64), (2, 1, 4, 16), 2, 2),
        ((2, 1, 4, 16), (2, 1, 64), 2, 2),
        ((4, 2, 1, 16), (4, 2, 16), 0, 0),
        ((1, 1, 8), (1, 8), 2, 1),
        ((2, 4, 8), (8, 8), 1, None),
        ((2, 1, 6), (2, 1, 3, 2), 2, None),
    ],
)
def test_views_move_the_shared_dim(
    before: tuple[int, ...], after: tuple[int, ...], dim: int, moved: int | None
) -> None:
    share = Share(dim, 1, 2)
    if moved is None:
        with pytest.raises(NotCarried):
            viewed(share, before, after)
        return
    assert viewed(share, before, after).dim == moved
    whole = torch.arange(torch.Size(before).numel()).reshape(before)
    for rank in range(2):
        local = share.take(whole, rank).reshape(Share(moved, 1, 2).local(after))
        assert torch.equal(local, Share(moved, 1, 2).take(whole.reshape(after), rank))


def test_shares_join_to_the_whole() -> None:
    whole = torch.arange(2 * 36).reshape(2, 36)
    share = Share(1, 3, 4)
    parts = [share.take(whole, rank) for rank in range(4)]
    assert parts[1].tolist()[0] == [3, 4, 5, 15, 16, 17, 27, 28, 29]
    assert torch.equal(share.join(parts), whole)
    assert share.whole(parts[0].shape) == (2, 36) and not share.divides(30)


def test_a_mesh_knows_its_places() -> None:
    mesh = DeviceMesh(dp=2, pp=3, tp=2, sp=2)
    assert mesh.size == 24 and mesh.place(0) == (0, 0, 0, 0) and mesh.place(18) == (1, 1, 1, 0)
    assert neighbours(mesh.sizes, ("sp",))[:3] == [(0, 2), (1, 3), (4, 6)]
    assert neighbours(mesh.sizes, ("pp", "sp", "tp")) == [tuple(range(12)), tuple(range(12, 24))]
    with pytest.raises(UsageError, match="rank 24"):
        mesh.place(24)
    assert DeviceMesh(tp=4, sp=2, over_tp=True).size == 4
    with pytest.raises(UsageError, match="sp 3"):
        DeviceMesh(tp=4, sp=3, over_tp=True)
    with pytest.raises(UsageError, match="tp 0"):
        DeviceMesh(tp=0)
