"""The pointwise cases and random programs of the interpreter's tests, compiled and run on the GPU."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

_PATH = Path(__file__).parents[1] / "interpreter" / "test_kernel_pointwise.py"
_SPEC = importlib.util.spec_from_file_location("interpreted_pointwise", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
SHARED = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = SHARED
_SPEC.loader.exec_module(SHARED)
kernel_of = SHARED.kernel_of


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHARED.CASES)
def test_a_kernel_computes_what_eager_does(name: str, kernel_of: Any) -> None:
    torch.manual_seed(0)
    function, operands = SHARED.CASES[name]
    operands = [tensor.cuda() for tensor in operands()]
    SHARED.check(SHARED.build(function, operands), function, operands, kernel_of)


@pytest.mark.gpu
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=SHARED.RANDOM.programs(most=6))
def test_random_programs_on_kernels(program: Any, kernel_of: Any) -> None:
    SHARED.check_program(program, kernel_of, "cuda")
