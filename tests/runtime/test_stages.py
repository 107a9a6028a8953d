"""Stages of a pipeline: the order in which they work, what crosses between them, and that they agree."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import kimigraph
from kimigraph.codegen import build_artifact
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError, RequiredFusionError, UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.report import CompileReport
from kimigraph.ir.stages import directory_of
from kimigraph.passes import Pipeline, run_pipeline
from kimigraph.passes.base import PassContext
from kimigraph.passes.fusions import require_fused
from kimigraph.passes.split_stages import SplitStages
from kimigraph.run import run_artifact, seeded
from kimigraph.runtime.executor import Executor
from kimigraph.runtime.generation.bound_step import BoundStep
from kimigraph.runtime.generation.stage_step import PipelinedStep, StagePart, parts_of, pipelined_step
from kimigraph.runtime.parallel.stage_links import queue_links
from kimigraph.runtime.parallel.stage_order import Action, order_of, prove_orders
from kimigraph.runtime.parallel.stages import facts_of, require_pipeline
from kimigraph.tools.run_stages import run_stages, stages_in

ROWS, WIDTH, WORDS, LAYERS = 2, 8, 16, 3


def toy() -> CapturedProgram:
    """A step of three layers, each with a state; what a layer gives is needed by all later ones."""

    def step(ids: Any, lengths: Any, table: Any, *rest: Any) -> Any:
        weights, states = rest[:LAYERS], rest[LAYERS:]
        blocks = [table[ids]]
        for weight, state in zip(weights, states, strict=True):
            mixed = torch.stack(blocks).sum(0) @ weight
            state.mul_(0.5).add_(mixed[:, 0] + lengths.unsqueeze(-1))
            blocks.append(torch.tanh(mixed + state.unsqueeze(1)))
        return blocks[-1] @ table.T

    tensors = [torch.zeros(ROWS, 1, dtype=torch.int64), torch.zeros(ROWS, dtype=torch.int32), torch.ones(WORDS, WIDTH)]
    tensors += [torch.ones(WIDTH, WIDTH) for _ in range(LAYERS)] + [torch.ones(ROWS, WIDTH) for _ in range(LAYERS)]
    graph_module = make_fx(step, tracing_mode="fake")(*tensors)
    [*_, output] = graph_module.graph.nodes
    output.args = ((output.args[0],),)
    graph_module.recompile()
    named: list[tuple[Any, str]] = [("input", "input_ids"), ("input", "lengths"), ("weight", "embed_tokens.weight")]
    named += [("weight", f"layers.{number}.weight") for number in range(LAYERS)]
    named += [("cache", f"state.{number}.x") for number in range(LAYERS)]
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    inputs = tuple(
        InputSpec(
            node.name,
            kind,
            source,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            str(tensor.dtype).removeprefix("torch."),
            mutated=kind == "cache",
            value_range=(0, 16) if kind == "input" else None,
        )
        for node, tensor, (kind, source) in zip(nodes, tensors, named, strict=True)
    )
    info = {"batch": ROWS, "tokens": 1, "model": "toy", "random_weights": True}
    return CapturedProgram(graph_module, inputs, (OutputSpec("logits", "logits"),), info=info)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``whole``, and pipelines of 2 and 3 stages."""
    root = tmp_path_factory.mktemp("pipelines")
    (root / "whole").mkdir()
    program = toy()
    build_artifact(program.copy(), "cpu:reference", root / "whole")
    for stages in (2, 3):
        for number in range(stages):
            directory = root / f"pp{stages}" / directory_of(number)
            directory.mkdir(parents=True)
            stage = program.copy()
            config = CompileConfig(target="cpu:reference", pp=stages, stage=number)
            run_pipeline(stage, Pipeline((SplitStages(),)), PassContext(config), [])
            build_artifact(stage, "cpu:reference", directory)
    return root


def executor(directory: Path) -> Executor:
    manifest = Manifest.read(directory)
    return Executor(directory, {spec.source: seeded(spec, manifest) for spec in manifest.bound})


def states(rows: int) -> dict[str, torch.Tensor]:
    return {f"state.{number}.x": torch.zeros(rows, WIDTH) for number in range(LAYERS)}


@pytest.mark.parametrize(("stages", "parts"), [(2, 1), (2, 2), (3, 2)])
def test_steps_of_a_pipeline_are_those_of_one_program(stages: int, parts: int, artifacts: Path) -> None:
    rows = ROWS * parts
    one = [{name: value[part * ROWS :][:ROWS] for name, value in states(rows).items()} for part in range(parts)]
    whole = [BoundStep(executor(artifacts / "whole"), caches) for caches in one]
    many = [states(rows) for _ in range(stages)]
    steps = [
        pipelined_step(
            lambda *_, number=number: executor(artifacts / f"pp{stages}" / directory_of(number)),
            rows,
            1,
            caches,
            link,
            micro_batches=parts,
        )
        for number, (caches, link) in enumerate(zip(many, queue_links(stages), strict=True))
    ]
    for turn in range(3):
        ids, lengths = [[turn + row] for row in range(rows)], [turn + 2 * row for row in range(rows)]
        wanted = torch.cat(
            [step(ids[part * ROWS :][:ROWS], lengths[part * ROWS :][:ROWS]) for part, step in enumerate(whole)]
        )
        found = [step(ids, lengths) for step in steps]
        assert [tuple(logits.shape) for logits in found[:-1]] == [(rows, 0)] * (stages - 1)
        torch.testing.assert_close(found[-1], wanted)
    for number, caches in enumerate(many):
        manifest = Manifest.read(artifacts / f"pp{stages}" / directory_of(number))
        for spec in manifest.inputs:
            if spec.mutated:
                torch.testing.assert_close(caches[spec.source], torch.cat([each[spec.source] for each in one]))


def test_rows_are_computed_in_equal_parts() -> None:
    assert [parts_of(rows, 4) for rows in (1, 2, 3, 4, 6, 8, 7)] == [1, 2, 3, 4, 3, 4, 1]


def test_a_pipeline_runs_in_one_process_with_the_results_of_one_program(artifacts: Path) -> None:
    whole = run_artifact(artifacts / "whole", None, None, 1)
    assert whole["passed"]
    for stages in (2, 3):
        assert stages_in(artifacts / f"pp{stages}") == stages
        found = run_stages(artifacts / f"pp{stages}", None, None, 2)
        assert found["passed"] and found["stages"] == stages and len(found["seconds"]) == 2
        assert found["outputs"].keys() == whole["outputs"].keys()
        for name, sums in whole["outputs"].items():
            assert found["outputs"][name] == pytest.approx(sums, rel=1e-5), name
    assert stages_in(artifacts / "whole") == 0


def test_each_stage_binds_its_own_weights(artifacts: Path) -> None:
    manifests = [Manifest.read(artifacts / "pp3" / directory_of(number)) for number in range(3)]
    assert [sorted(spec.source for spec in manifest.bound) for manifest in manifests] == [
        ["embed_tokens.weight", "layers.0.weight"],
        ["layers.1.weight"],
        ["embed_tokens.weight", "layers.2.weight"],  # the table is the head, too
    ]


def test_a_program_of_all_layers_is_no_stage(artifacts: Path) -> None:
    with pytest.raises(CompileError, match="the program is one of all layers"):
        StagePart(executor(artifacts / "whole"), states(ROWS), ROWS, 1)


def test_what_is_sent_must_be_what_is_taken(artifacts: Path) -> None:
    facts = [facts_of(Manifest.read(artifacts / "pp3" / directory_of(number))) for number in range(3)]
    require_pipeline(facts)
    short = {**facts[1], "pipeline": {**facts[1]["pipeline"], "receives": facts[1]["pipeline"]["receives"][:-1]}}
    with pytest.raises(CompileError, match=r"stage 0 sends .* and stage 1 takes"):
        require_pipeline([facts[0], short, facts[2]])
    with pytest.raises(CompileError, match="rank 1 of a pipeline of 3 stages has stage 2 of 3"):
        require_pipeline([facts[0], facts[2], facts[2]])
    with pytest.raises(CompileError, match="has a program of all layers"):
        require_pipeline([{**facts[0], "pipeline": None}])
    other = {**facts[2], "equal": {**facts[2]["equal"], "shape": "decode-b4"}}
    with pytest.raises(CompileError, match=r"stage 2 has a program of another shape \(decode-b4\)"):
        require_pipeline([*facts[:2], other])


def test_a_required_fusion_fires_in_one_of_the_stages() -> None:
    reports = [CompileReport(fusions=[{"rule": "raise-kda", "count": count}]) for count in (0, 2)]
    require_fused(reports, ("raise-kda",))
    with pytest.raises(RequiredFusionError, match="in any stage: raise-kda, raise-moe"):
        require_fused(reports[:1], ("raise-kda", "raise-moe"))


def test_a_module_of_the_callers_has_no_stages() -> None:
    with pytest.raises(UsageError, match=r"pp 2: .* use kimigraph\.Generator"):
        kimigraph.optimize(torch.nn.Linear(2, 2), (torch.ones(1, 2),), CompileConfig(pp=2))


def test_a_message_that_was_not_sent_is_an_error(artifacts: Path) -> None:
    part = StagePart(executor(artifacts / "pp2" / directory_of(1)), states(ROWS), ROWS, 1)
    with pytest.raises(CompileError, match="waits for a message that the stage before it has not sent"):
        PipelinedStep([part], queue_links(2)[1]).again()


def orders(stages: int, parts: int) -> list[list[Action]]:
    return [order_of(stage, stages, parts) for stage in range(stages)]


def test_every_order_goes_through() -> None:
    for stages, parts in product(range(1, 5), range(1, 6)):
        prove_orders(orders(stages, parts))
    assert [str(action) for action in order_of(1, 3, 2)] == (
        ["post 0", "await 0", "post 1", "compute 0", "send 0", "await 1", "compute 1", "send 1"]
    )


def swapped(order: list[Action], first: int, second: int) -> list[Action]:
    changed = list(order)
    changed[first], changed[second] = changed[second], changed[first]
    return changed


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda order: swapped(order, 0, 1), "stage 1 handles part 0 of a step in the wrong order"),
        (lambda order: swapped(order, 1, 3), "stage 1 handles part 0 of a step in the wrong order"),
        (lambda order: [replace(action, part=1 - action.part) for action in order], "both must have one order"),
        (lambda order: [action for action in order if action.kind != "send"], "it has to be post 0, await 0"),
        (lambda order: [*order, order[-1]], "does something twice"),
    ],
)
def test_an_order_that_was_changed_is_refused(change: Callable[[list[Action]], list[Action]], told: str) -> None:
    found = orders(3, 2)
    found[1] = change(found[1])
    with pytest.raises(CompileError, match=told):
        prove_orders(found)


def test_stages_that_wait_for_one_another_are_named() -> None:
    found = orders(3, 2)
    del found[0][-1], found[0][-1]  # the second part is never computed nor sent
    with pytest.raises(CompileError, match="wait for one another: stage 1 at 'await 1'; stage 2 at 'await 1'"):
        prove_orders(found)
