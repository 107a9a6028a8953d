"""Decoding with a log on the GPU: the interpreter's cases, and full width to the bit whenever a state is written."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

_PATH = Path(__file__).parents[1] / "interpreter" / "test_kernel_kda_logged.py"
_SPEC = importlib.util.spec_from_file_location("cases_kda_logged", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
CASES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(CASES)
globals().update({name: test for name, test in vars(CASES).items() if name.startswith("test_")})


@pytest.fixture(params=["cpu", "cuda"])
def target(request):
    """The form for any size ("cpu" has no other) and the one for heads of 128."""
    return request.param


@pytest.mark.parametrize(("batch", "length"), [(2, 8), (12, 8), (12, 5), (5, 16)])
def test_states_at_width_are_those_of_decoding_to_the_bit(kernel, batch, length):
    operands = CASES.operands_of(
        5, batch=batch, heads=32, key_dim=128, value_dim=128, dtype=torch.bfloat16, length=length
    )
    CASES.compare(kernel, CASES.on("cuda", operands), CASES.attributes_of(), "cuda", 2 * length + 3)
