"""Models whose sequences ranks share out, and what one process computes beside what ranks do."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from rank_models import DEEPSEEK, GLM, KIMI, PUBLIC

from kimigraph.capture import capture, load_source
from kimigraph.capture.stretches import STRETCH, stretch_of
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.lock_step import run_ranks
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.reference.sequence_shards import SequenceShards
from kimigraph.ir.script import make_inputs
from kimigraph.ir.verifier import verify
from kimigraph.passes import Pipeline, default_pipeline, run_pipeline
from kimigraph.passes.balance_indexer import BalanceIndexer
from kimigraph.passes.base import PassContext
from kimigraph.passes.prune_index_exchange import PruneIndexExchange
from kimigraph.passes.shard import Shard
from kimigraph.passes.share_tokens import ShareTokens

SHARED = {**PUBLIC, "model_type": "glm_moe_dsa", "qk_rope_head_dim": 4, "indexer_types": ["full", "shared"]}
"""Two attentions read one indexer's list."""
MODELS = {"kimi": KIMI, "deepseek": DEEPSEEK, "glm": GLM, "shared": SHARED}
LAST_LENGTHS = torch.tensor([0, 1, 2, 3, 5, 7, 8, 11, 13, 17, 20, 21], dtype=torch.int32)
"""Tokens before the step, of each sequence: none, fewer than ranks, runs that are full, and that are not."""


@cache
def captured(
    model: str, rows: bool = False, stretch: bool = False, until: str = "shard", **options: Any
) -> tuple[CapturedProgram, CompileConfig]:
    """The step of a model, or that of a ``stretch`` of its tokens, up to where ranks come in."""
    config = CompileConfig(target="cpu:reference", **{"batch": 12, "tokens": 1, "context": 24, **options})
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODELS[model]))
        source = load_source(directory, config, rows=rows)
        cut = stretch_of(source, config, 1) if stretch else source
        assert cut is not None
        program = capture(cut, config)
    if stretch:
        program.info[STRETCH] = options["tokens"] // config.sp
    pipeline = default_pipeline(config)
    run_pipeline(program, Pipeline(pipeline.passes[: pipeline.names.index(until)]), PassContext(config), [])
    return program, config


def on_ranks(program: CapturedProgram, config: CompileConfig, sp: int, tp: int = 1, **fields: Any) -> CapturedProgram:
    """The program of these ranks."""
    shared = program.copy()
    passes = Pipeline((Shard(), ShareTokens(), PruneIndexExchange(**fields), BalanceIndexer(always=True)))
    run_pipeline(shared, passes, PassContext(replace(config, sp=sp, tp=tp)), [])
    verify(shared)
    return shared


def inputs_of(program: CapturedProgram, rank: int = 0, **given: torch.Tensor) -> list[torch.Tensor]:
    """Seeded inputs of a rank, but for those ``given`` by source."""
    constants = {spec.source: program.tensors[spec.name] for spec in program.inputs if spec.kind == "constant"}
    made = make_inputs(program.inputs, constants, 3, rank=rank)
    return [
        spec.taken(given[spec.source], rank).clone() if spec.source in given else tensor
        for spec, tensor in zip(program.inputs, made, strict=True)
    ]


def both(
    program: CapturedProgram, shared: CapturedProgram, steps: int = 1, **given: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, value of one process and value of all ranks of every output and updated input, after so many steps."""
    mesh = shared.info["mesh"]
    one, many = (
        [inputs_of(program, **given)],
        [inputs_of(shared, rank, **given) for rank in range(math.prod(mesh.values()))],
    )
    for _ in range(steps):
        [wanted] = run_ranks(program.graph_module, one)
        found = run_ranks(shared.graph_module, many, mesh)
    for rank in found:
        assert all(map(torch.equal, rank, found[0])), "ranks differ in what they return"
    yield from zip([spec.name for spec in program.outputs], wanted, found[0], strict=True)
    for place, spec in enumerate(shared.inputs):
        if spec.mutated:
            parts = [arguments[place] for arguments in many]
            whole = parts[0]
            if spec.shared is not None:
                whole = spec.shared.join(parts[:: spec.share_step][: spec.shared.ways])
            yield spec.source, one[0][place], whole


def assert_equal(results: Iterator[tuple[str, torch.Tensor, torch.Tensor]]) -> set[str]:
    """Floats to fp32 tolerance (what is no number in both places counts as equal), integers to the bit."""
    names = set[str]()
    for name, one, many in results:
        names.add(name)
        if one.is_floating_point():
            one, many = one.nan_to_num(7.0), many.nan_to_num(7.0)
            assert (one - many).abs().max() <= 1e-4 * max(float(one.abs().max()), 1e-6), name
        else:
            assert torch.equal(one, many), name
    return names


def picks_of(program: CapturedProgram, **given: torch.Tensor) -> torch.Tensor:
    """What the indexer lists [B, S, k], or what ranks list together: each the tokens that it has."""
    graph = program.graph_module.graph
    [output] = [node for node in graph.nodes if node.op == "output"]
    wanted = {OPERATORS["lightning_indexer"].overload, OPERATORS["exchange_picks"].overload}
    node = [node for node in graph.nodes if node.target in wanted][-1]
    output.args = ((node,),)
    mesh = program.info.get("mesh")
    ranks = range(mesh["sp"] if mesh else 1)
    found = run_ranks(program.graph_module, [inputs_of(program, rank, **given) for rank in ranks], mesh)
    if mesh is None:
        return found[0][0]
    shards = SequenceShards(mesh["sp"], cast("int", node.kwargs["run"]))
    behind = torch.iinfo(torch.int32).max
    every: list[torch.Tensor] = []
    for rank, (own,) in enumerate(found):
        kept = own >= 0
        assert (kept[..., :-1] >= kept[..., 1:]).all() and (own[..., :-1] < own[..., 1:])[kept[..., 1:]].all()
        every.append(torch.where(kept, shards.tokens(own, rank), behind))
    listed = torch.cat(every, -1).sort(-1).values[..., : found[0][0].shape[-1]]
    return torch.where(listed == behind, -1, listed)
