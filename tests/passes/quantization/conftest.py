"""Tiny K3.1 as it is before quantization, and the pass on a copy of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.policy import policy_of
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import PassContext, PassRecord, Pipeline, default_pipeline, run_pipeline

ROOT = Path(__file__).parents[3]
CONFIG = CompileConfig(
    target="cpu:reference", batch=2, context=32, cache="off", overrides=(("num_hidden_layers", "4"),)
)
NAME = "insert-quantization"


@pytest.fixture(scope="session")
def fused() -> CapturedProgram:
    torch.set_num_threads(1)
    program = capture(load_source(str(ROOT / "examples" / "k31_tiny"), CONFIG), CONFIG)
    pipeline = default_pipeline(CONFIG).through(NAME).without((NAME,))
    run_pipeline(program, pipeline, PassContext(CONFIG))
    return program


@pytest.fixture
def quantise(fused: CapturedProgram) -> Callable[..., tuple[CapturedProgram, PassRecord]]:
    """(program, record) of the pass under a policy, verified, on ``program`` or a copy of the fused one."""

    def run(policy: str, program: CapturedProgram | None = None) -> tuple[CapturedProgram, PassRecord]:
        policy_of(policy)
        copy = fused.copy() if program is None else program
        context = PassContext(replace(CONFIG, policy=policy))
        [record] = run_pipeline(copy, Pipeline.parse(NAME), context)
        return copy, record

    return run
