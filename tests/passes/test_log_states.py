"""The pass that takes recurrent states out of a step which verifies drafts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kimigraph.capture import capture, load_source
from kimigraph.compiler import compile_source
from kimigraph.ir import purity
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError, UsageError
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.script import make_inputs
from kimigraph.passes import PassContext, Pipeline, run_pipeline

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
CONFIG = CompileConfig(
    target="cpu:reference",
    phase="verify",
    batch=2,
    tokens=4,
    context=32,
    overrides=(("num_hidden_layers", "4"),),
    cache="off",
)


def after(passes: str, config: CompileConfig = CONFIG) -> CapturedProgram:
    program = capture(load_source(EXAMPLE, config, rows=True), config)
    run_pipeline(program, Pipeline.parse(passes), PassContext(config), [])
    return program


@pytest.fixture(scope="module")
def programs() -> tuple[CapturedProgram, CapturedProgram]:
    return after("canonicalize,raise-kda"), after("canonicalize,raise-kda,log-states")


def test_every_layer_is_logged_and_no_state_is_written(programs: tuple[CapturedProgram, CapturedProgram]) -> None:
    _, logged = programs
    graph = logged.graph_module.graph
    verifying = graph.find_nodes(op="call_function", target=OPERATORS["kda_verify"].overload)
    assert len(verifying) == 3
    assert all(node.args[12] is not None and node.args[13] is not None for node in verifying), "gate and norm inside"
    for name in ("kda_prefill", "short_conv"):
        assert not graph.find_nodes(op="call_function", target=OPERATORS[name].overload)
    written = {purity.storage_root(place).name for node in graph.nodes for place in purity.mutated_arguments(node)}
    changed = {spec.source for spec in logged.inputs if spec.name in written}
    assert changed == {spec.source for spec in logged.inputs if spec.mutated}
    assert {name.split(".")[0] for name in changed} == {"cache", "log"}
    log = {spec.source: spec.shape for spec in logged.inputs if spec.source.startswith("log.1.")}
    wanted = dict.fromkeys(("keys", "decays", "deltas"), (2, 4, 4, 16)) | {"inputs": (2, 4, 192)}
    assert log == {f"log.1.{part}": shape for part, shape in wanted.items()}


def test_outputs_and_folded_states_are_those_of_the_prefill(
    programs: tuple[CapturedProgram, CapturedProgram],
) -> None:
    plain, logged = programs
    tensors = make_inputs(logged.inputs, {}, 3, None)
    known = dict(zip((spec.source for spec in logged.inputs), tensors, strict=True))
    known["lengths"] = torch.tensor([5, 9], dtype=torch.int32)
    own = {name: tensor.clone() for name, tensor in known.items()}
    (wanted,) = torch.fx.Interpreter(plain.graph_module).run(*(own[spec.source] for spec in plain.inputs))
    (found,) = torch.fx.Interpreter(logged.graph_module).run(*(known[spec.source] for spec in logged.inputs))
    assert found.shape == (2, 4, 256), "of all tokens, though a step of generation gives those of the last"
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for layer in range(3):
        stack = [known[f"state.{layer}.{part}"].unsqueeze(0).clone() for part in ("kda", "conv")]
        records = [known[f"log.{layer}.{part}"].unsqueeze(0) for part in ("keys", "decays", "deltas", "inputs")]
        OPERATORS["kda_replay"].reference(*stack, *records, torch.tensor([4, 4]), state_layout="vk")
        for folded, part in zip(stack, ("kda", "conv"), strict=True):
            torch.testing.assert_close(folded[0], own[f"state.{layer}.{part}"], rtol=1e-4, atol=1e-5)


def test_other_phases_are_left_alone() -> None:
    config = replace(SMALL, phase="prefill")
    assert str(after("canonicalize,raise-kda,log-states", config).graph_module.graph) == str(
        after("canonicalize,raise-kda", config).graph_module.graph
    )


SMALL = replace(CONFIG, overrides=(("num_hidden_layers", "1"),))


def test_a_layer_that_cannot_be_logged_is_an_error() -> None:
    with pytest.raises(CompileError, match="gate and norms are computed before it"):
        after("canonicalize,log-states", SMALL)


def test_states_that_nothing_logs_are_an_error() -> None:
    with pytest.raises(CompileError, match="writes the recurrent state state_0_conv"):
        after("canonicalize,raise-kda,log-states", replace(SMALL, marks=False))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"opt_level": 0}, "needs the pass log-states"),
        ({"disabled_passes": ("log-states",)}, "needs the pass log-states"),
        ({"verify": True}, "phase verify with --verify"),
        ({"tokens": 1}, "verifies no draft"),
    ],
)
def test_what_would_not_verify_drafts_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compile_source(EXAMPLE, [replace(SMALL, **change)], tmp_path / "out", lambda text: None)
