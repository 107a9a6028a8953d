"""``split-stages``: stages one behind the other compute what the whole step does, and each value crosses once."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rank_models
import torch

from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError, UsageError
from kimigraph.ir.lock_step import run_ranks
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.script import make_inputs
from kimigraph.ir.stages import BOUNDARY, Stage, layer_of, layer_spans
from kimigraph.ir.verifier import verify
from kimigraph.passes import Pipeline, default_pipeline, run_pipeline
from kimigraph.passes.base import PassContext
from kimigraph.passes.fusions import fusion_summary
from kimigraph.passes.manager import PassRecord
from kimigraph.passes.split_stages import SplitStages
from kimigraph.session import pass_context

FOUR_HEADS = {"num_attention_heads": 4, "max_position_embeddings": 256}
THREE_LAYERS = {
    **FOUR_HEADS,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
KIMI = {
    **rank_models.KIMI,
    **FOUR_HEADS,
    "num_hidden_layers": 5,
    "linear_attn_config": {"full_attn_layers": [2, 4], "kda_layers": [1, 3, 5], "num_heads": 4, "head_dim": 4},
}
DEEPSEEK = {**rank_models.DEEPSEEK, **THREE_LAYERS}
GLM = {
    **rank_models.GLM,
    "text_config": {
        **rank_models.GLM["text_config"],
        **THREE_LAYERS,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "indexer_types": ["full", "full", "full"],
        "linear_num_heads": 4,
    },
}
Tensors = dict[str, torch.Tensor]


def captured(document: dict[str, Any], phase: Any, directory: Path) -> tuple[CapturedProgram, CompileConfig]:
    (directory / "config.json").write_text(json.dumps(document))
    tokens = 8 if phase == "prefill" else 1
    rows = 1 if document["model_type"] == "glm5_next" and phase == "prefill" else 2
    config = CompileConfig(target="cpu:reference", phase=phase, batch=rows, tokens=tokens, context=24)
    return capture(load_source(str(directory), config), config), config


def constants_of(program: CapturedProgram) -> Tensors:
    return {spec.source: program.tensors[spec.name] for spec in program.inputs if spec.kind == "constant"}


def run(program: CapturedProgram, ways: int, arrived: Tensors) -> tuple[Tensors, Tensors]:
    """What a program returns, and its updated inputs; ``arrived`` in place of seeded inputs."""
    ranks = [make_inputs(program.inputs, constants_of(program), 3, rank=rank) for rank in range(ways)]
    for tensors in ranks:
        for place, spec in enumerate(program.inputs):
            if spec.source in arrived:
                tensors[place] = arrived[spec.source].contiguous()
    results = run_ranks(program.graph_module, ranks)
    updated = {
        spec.source: parts[0] if spec.shared is None else spec.shared.join(parts)
        for spec, parts in zip(program.inputs, zip(*ranks, strict=True), strict=True)
        if spec.mutated
    }
    return {spec.source: value for spec, value in zip(program.outputs, results[0], strict=True)}, updated


def compiled(program: CapturedProgram, config: CompileConfig) -> tuple[CapturedProgram, list[PassRecord]]:
    """The program behind all passes that know of operators, heads and layers."""
    made = program.copy()
    records = run_pipeline(made, default_pipeline(config).through("shard"), pass_context(config), [])
    verify(made)
    return made, records


def pipelined(
    program: CapturedProgram, config: CompileConfig, stages: int, tp: int = 1
) -> tuple[Tensors, Tensors, list[CapturedProgram], Counter[str]]:
    """Results and updated caches of all stages, their programs, and how often each fusion fired."""
    on_the_way: Tensors = {}
    results: Tensors = {}
    updated: Tensors = {}
    programs: list[CapturedProgram] = []
    fused = Counter[str]()
    for number in range(stages):
        made, records = compiled(program, replace(config, pp=stages, stage=number, tp=tp))
        fused.update({item["rule"]: item["count"] for item in fusion_summary(records)})
        stage = Stage.of(made.info)
        assert stage is not None and {item.name for item in stage.receives} == on_the_way.keys()
        results, states = run(made, tp, on_the_way)
        known = {**on_the_way, **results}
        on_the_way = {item.name: known[item.name] for item in stage.sends}
        for item in stage.sends:
            value = on_the_way[item.name]
            assert tuple(value.shape) == item.shape and value.dtype == item.type
        updated |= states
        programs.append(made)
    return results, updated, programs, fused


def require_close(one: Tensors, many: Tensors) -> None:
    assert one.keys() == many.keys()
    for name, want in one.items():
        worst = (want.float() - many[name].float()).abs().max()
        assert worst <= 1e-4 * max(float(want.abs().max()), 1e-6), name


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[CapturedProgram, CompileConfig]:
    """The decode step of a tiny K3.1."""
    return captured(KIMI, "decode", tmp_path_factory.mktemp("kimi"))


def test_stages_of_k31_compute_what_the_whole_step_does(kimi: tuple[CapturedProgram, CompileConfig]) -> None:
    require_equal(*kimi)


@pytest.mark.parametrize(
    ("document", "phase"),
    [
        pytest.param(DEEPSEEK, "decode", id="deepseek_v32-decode"),
        pytest.param(GLM, "decode", id="glm5_next-decode"),
        pytest.param(KIMI, "prefill", id="kimi_k31-prefill", marks=pytest.mark.slow),
        pytest.param(DEEPSEEK, "prefill", id="deepseek_v32-prefill", marks=pytest.mark.slow),
        pytest.param(GLM, "prefill", id="glm5_next-prefill", marks=pytest.mark.slow),
    ],
)
def test_stages_compute_what_the_whole_step_does(document: dict[str, Any], phase: str, tmp_path: Path) -> None:
    require_equal(*captured(document, phase, tmp_path))


def require_equal(program: CapturedProgram, config: CompileConfig) -> None:
    """Results, caches and fusions of 2 and of 3 stages are those of one program."""
    whole, records = compiled(program, config)
    wanted, states = run(whole, 1, {})
    fused = Counter({item["rule"]: item["count"] for item in fusion_summary(records)})
    for stages in (2, 3):
        results, updated, programs, found = pipelined(program, config, stages)
        require_close(wanted, results)
        require_close(states, updated)
        for rule in ("raise-kda", "raise-attention-residual", "raise-moe", "fuse-lightning-indexer"):
            assert found[rule] == fused[rule], f"{rule}: a boundary goes through what it finds"
        _require_own_weights(program, programs)


def _require_own_weights(program: CapturedProgram, programs: Sequence[CapturedProgram]) -> None:
    """Each stage takes the weights and caches of its layers, and together they take all, once."""
    taken = [[spec.source for spec in each.inputs if spec.kind in ("weight", "cache")] for each in programs]
    wanted = [spec.source for spec in program.inputs if spec.kind in ("weight", "cache")]
    assert sorted(name for names in taken for name in names) == sorted(wanted)
    for each, names in zip(programs, taken, strict=True):
        stage = Stage.of(each.info)
        assert stage is not None
        first, beyond = stage.layers
        assert all(first <= layer < beyond for name in names if (layer := layer_of(name)) is not None)


def test_the_prefix_and_each_finished_block_cross_once(kimi: tuple[CapturedProgram, CompileConfig]) -> None:
    program, config = kimi
    whole = program.copy()
    run_pipeline(whole, Pipeline(default_pipeline(config).passes[:1]), PassContext(config), [])
    _, _, programs, _ = pipelined(program, config, 3)
    found = [stage for each in programs if (stage := Stage.of(each.info)) is not None]
    assert [stage.layers for stage in found] == [(0, 2), (2, 4), (4, 5)]
    # Blocks of 2 layers: behind 2 layers the embedding and the block that is just finished, behind 4 one more.
    assert [len(stage.sends) for stage in found] == [2, 3, 0]
    assert [len(stage.passes_on) for stage in found] == [0, 2, 0]
    hidden = (2, 1, rank_models.WIDTHS["hidden_size"])
    assert {item.shape for stage in found for item in stage.sends} == {hidden}
    nodes = {node.name: node for node in whole.graph_module.graph.nodes}
    sent = [nodes[item.name.removeprefix(BOUNDARY)] for item in found[1].sends]
    assert "embedding" in str(sent[0].target) and len({*sent}) == 3
    [remark] = [
        remark
        for remark in compiled(program, replace(config, pp=3, stage=1))[1][1].result.remarks
        if remark.pass_name == "split-stages"
    ]
    assert "2 values (768 bytes) arrive and 3 (1,152 bytes) go on, 2 of them (768 bytes)" in remark.message


def test_stages_of_ranks_that_share_out_heads(kimi: tuple[CapturedProgram, CompileConfig]) -> None:
    program, config = kimi
    wanted, states = run(program, 1, {})
    results, updated, programs, _ = pipelined(program, config, 2, tp=2)
    require_close(wanted, results)
    require_close(states, updated)
    assert all("all_reduce" in str(each.graph_module.graph) for each in programs)


def test_layers_are_shared_out_evenly() -> None:
    assert layer_spans(8, 3) == [(0, 3), (3, 6), (6, 8)]
    assert layer_spans(4, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    with pytest.raises(UsageError, match="pp 5: the model has 4 layers, and each stage needs one; give pp 1 to 4"):
        layer_spans(4, 5)
    assert [layer_of(name) for name in ("model.layers.12.mlp.up_proj.weight", "state.3.kda", "lm_head.weight")] == (
        [12, 3, None]
    )


Trace = Callable[..., CapturedProgram]
SOURCES = {"x": ("input", "x"), "w0": ("weight", "layers.0.w"), "w1": ("weight", "layers.1.w")}


def toy(trace: Trace, step: Callable[..., Any]) -> CapturedProgram:
    """A program over x, a weight of each of two layers, and caches c0 and c1 of them."""
    program = trace(step, *(torch.ones(4, 4) for _ in range(5)))
    kinds = [*SOURCES.values(), ("cache", "cache.0.k"), ("cache", "cache.1.k")]
    program.inputs = tuple(
        replace(spec, kind=kind, source=source) for spec, (kind, source) in zip(program.inputs, kinds, strict=True)
    )
    return program


def split(program: CapturedProgram, stage: int) -> Stage:
    """The stage of two that is left of a program."""
    config = CompileConfig(target="cpu:reference", pp=2, stage=stage)
    run_pipeline(program, Pipeline((SplitStages(),)), PassContext(config), [])
    found = Stage.of(program.info)
    assert found is not None
    return found


def test_a_cache_of_another_stage_is_an_error_that_names_it(trace: Trace) -> None:
    def reads(x: Any, w0: Any, w1: Any, c0: Any, c1: Any) -> Any:
        c0.copy_(x @ w0)
        c1.copy_(x @ w1)
        return c0 + c1

    def writes(x: Any, w0: Any, w1: Any, c0: Any, c1: Any) -> Any:
        c0.copy_(x @ w1)
        return c0 @ w0 + c1

    for step, told in ((reads, "stage 1 reads c0_1 through"), (writes, "writes c0_1, which stage 0 has")):
        with pytest.raises(CompileError, match=told):
            split(toy(trace, step), 1)


def test_a_buffer_that_both_stages_write_is_of_the_later_one(trace: Trace) -> None:
    def step(x: Any, w0: Any, w1: Any, c0: Any, c1: Any) -> Any:
        found = torch.zeros(4, 4)
        found.add_(x @ w0)
        found.add_(x @ w1)
        return found

    programs = [toy(trace, step) for _ in range(3)]
    stages = [split(program, stage) for stage, program in enumerate(programs[1:])]
    assert [len(stage.sends) for stage in stages] == [1, 0] and len(stages[1].receives) == 1
    wanted, _ = run(programs[0], 1, {})
    first, _ = run(programs[1], 1, {})
    found, _ = run(programs[2], 1, first)
    require_close(wanted, found)


def test_what_is_light_or_made_of_inputs_alone_does_not_cross(trace: Trace) -> None:
    def step(x: Any, w0: Any, w1: Any, c0: Any, c1: Any) -> Any:
        mask = (x > 0).float()  # of inputs alone
        hidden = (x @ w0) * mask
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)  # light work on what crosses anyway
        return torch.stack([hidden, hidden * scale]) @ w1 * mask

    program = toy(trace, step)
    wanted, _ = run(program, 1, {})
    first, second = program.copy(), program.copy()
    sends = split(first, 0).sends
    assert split(second, 1).receives == sends and [item.shape for item in sends] == [(4, 4)]
    found, _ = run(second, 1, run(first, 1, {})[0])
    require_close(wanted, found)


def test_one_stage_changes_nothing(trace: Trace, context: PassContext) -> None:
    program = toy(trace, lambda x, w0, w1, c0, c1: x @ w0 @ w1)
    assert not SplitStages().apply(program, context).modified
