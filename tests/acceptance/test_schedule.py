"""The schedule of the example model: forced onto several streams it is proven and computes the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kimigraph.capture import capture, load_source
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.data_sets import data_sets, make_data
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.schedule import stream_of, waits_of
from kimigraph.passes import PassContext, default_pipeline, run_pipeline
from kimigraph.passes.plan_memory import PlanMemory
from kimigraph.passes.verify_schedule import ScheduleError, VerifySchedule

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
CONFIG = CompileConfig(
    target="cpu:reference", batch=2, context=64, overrides=(("num_hidden_layers", "4"),), cache="off", report=False
)
FORCED = replace(CONFIG, force_streams=True)


@pytest.fixture(scope="module")
def captured() -> CapturedProgram:
    return capture(load_source(EXAMPLE, CONFIG), CONFIG)


def scheduled(captured: CapturedProgram, config: CompileConfig) -> CapturedProgram:
    program = captured.copy()
    run_pipeline(program, default_pipeline(config), PassContext(config))
    return program


def computed(program: CapturedProgram) -> list[torch.Tensor]:
    """Outputs and inputs afterwards of one step on seeded tensors, with the weights of the model."""
    constants = {spec.source: program.tensors[spec.name] for spec in program.inputs if spec.kind == "constant"}
    tensors = make_data(data_sets()[0], program.inputs, constants)
    program.graph_module.recompile()
    with torch.no_grad():
        return [*program.graph_module(*tensors), *tensors]


def test_forced_streams_compute_the_same_bits(captured: CapturedProgram) -> None:
    single, forked = scheduled(captured, CONFIG), scheduled(captured, FORCED)
    assert not any(stream_of(node) for node in single.graph_module.graph.nodes)
    assert len({stream_of(node) for node in forked.graph_module.graph.nodes}) >= 2
    assert all(map(torch.equal, computed(forked), computed(single)))


def test_every_wait_of_the_example_is_needed(captured: CapturedProgram) -> None:
    program = scheduled(captured, FORCED)
    waiting = [node for node in program.graph_module.graph.nodes if waits_of(node)]
    assert waiting
    for node in waiting:
        waits = node.meta["waits"]
        node.meta["waits"] = waits[1:]
        with pytest.raises(ScheduleError, match=f"the edge {waits[0]} -> |{waits[0]} .* is done"):
            VerifySchedule().apply(program, PassContext(FORCED))
        node.meta["waits"] = waits


def test_planned_memory_is_safe_on_several_streams(captured: CapturedProgram) -> None:
    program = scheduled(captured, FORCED)
    PlanMemory().apply(program, PassContext(FORCED))
    proven = VerifySchedule().apply(program, PassContext(FORCED)).statistics
    assert proven["streams"] >= 2 and proven["buffers"] >= 20


def test_a_forced_program_is_compiled_and_verified(tmp_path: Path) -> None:
    [report] = compile_source(EXAMPLE, [replace(FORCED, verify=True)], tmp_path / "artifact", print)
    assert report.verify is not None and report.verify["passed"]
    assert report.streams is not None and report.streams["count"] >= 2 and report.streams["events"] >= 2
    assert report.streams["critical_path_us"] < report.streams["serial_us"]
    assert "lanes[1]" in (tmp_path / "artifact" / "program.py").read_text(encoding="utf-8")
