"""The fixtures of the interpreter's kernel tests, on the GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the rooms of ranks
_PATH = Path(__file__).parents[1] / "interpreter" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("interpreter_fixtures", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
_FIXTURES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_FIXTURES)
kernel = _FIXTURES.kernel


@pytest.fixture
def device() -> str:
    return "cuda"
