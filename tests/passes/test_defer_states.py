"""The pass that has a decode step write recurrent states with every L-th token."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.script import make_inputs
from kimigraph.passes import PassContext, Pipeline, run_pipeline

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
LENGTH = 3
CONFIG = CompileConfig(
    target="cpu:reference", batch=2, context=32, overrides=(("num_hidden_layers", "4"),), cache="off", state_log=LENGTH
)


@pytest.fixture(scope="module")
def captured() -> CapturedProgram:
    return capture(load_source(EXAMPLE, CONFIG, rows=True), CONFIG)


def after(captured: CapturedProgram, passes: str, config: CompileConfig = CONFIG) -> CapturedProgram:
    program = captured.copy()
    run_pipeline(program, Pipeline.parse(passes), PassContext(config), [])
    return program


def test_every_layer_gets_a_log_and_the_step_moves_on(captured: CapturedProgram) -> None:
    program = after(captured, "canonicalize,raise-kda,defer-states")
    graph = program.graph_module.graph
    assert len(graph.find_nodes(op="call_function", target=OPERATORS["kda_decode_logged"].overload)) == 3
    assert not graph.find_nodes(op="call_function", target=OPERATORS["kda_decode"].overload)
    log = {spec.source: spec for spec in program.inputs if spec.source.startswith("log.")}
    assert {name: spec.shape for name, spec in log.items()} == {
        "log.filled": (2,),
        **{f"log.{layer}.{part}": (2, LENGTH, 4, 16) for layer in range(3) for part in ("keys", "decays", "deltas")},
    }
    assert all(spec.mutated and spec.kind == "cache" for spec in log.values())
    assert log["log.filled"].value_range == (0, LENGTH)


def test_steps_give_what_they_gave_and_leave_the_same_states(captured: CapturedProgram) -> None:
    """Logs of both sequences at different places; fp32, to the bit."""
    plain = after(captured, "canonicalize,raise-kda")
    logged = after(captured, "canonicalize,raise-kda,defer-states")
    tensors = make_inputs(logged.inputs, {}, 3, None)
    known = dict(zip((spec.source for spec in logged.inputs), tensors, strict=True))
    known["log.filled"] = torch.tensor([0, 0], dtype=torch.int32)
    own = {name: tensor.clone() for name, tensor in known.items()}
    for step in range(2 * LENGTH):
        for tensors in (known, own):
            tensors["input_ids"] = torch.tensor([[3 + step], [7 * step]])
            tensors["lengths"] = torch.tensor([5 + step, 9 + step], dtype=torch.int32)
        (wanted,) = torch.fx.Interpreter(plain.graph_module).run(*(own[spec.source] for spec in plain.inputs))
        (found,) = torch.fx.Interpreter(logged.graph_module).run(*(known[spec.source] for spec in logged.inputs))
        assert torch.equal(found, wanted)
        full = (step + 1) % LENGTH == 0
        assert known["log.filled"].tolist() == [(step + 1) % LENGTH] * 2
        for layer in range(3):
            assert torch.equal(known[f"state.{layer}.conv"], own[f"state.{layer}.conv"])
            assert torch.equal(known[f"state.{layer}.kda"], own[f"state.{layer}.kda"]) is full


@pytest.mark.parametrize("change", [{"state_log": 1}, {"phase": "prefill"}])
def test_it_does_nothing_unasked_and_in_other_phases(captured: CapturedProgram, change: dict[str, object]) -> None:
    config = replace(CONFIG, **change)
    before = after(captured, "canonicalize,raise-kda")
    program = after(captured, "canonicalize,raise-kda,defer-states", config)
    assert str(program.graph_module.graph) == str(before.graph_module.graph)
    assert program.inputs == before.inputs
