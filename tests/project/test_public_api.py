"""What users import keeps its names, parameters and defaults, unless a change says so in the snapshot.

After a change that is meant: ``python scripts/write_public_api.py``, and a line in CHANGELOG.md.
"""

import importlib.util
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_public_api.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("write_public_api", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_public_interface_is_the_recorded_one() -> None:
    module = script()
    assert list(module.lines()) == module.EXPECTED.read_text(encoding="utf-8").splitlines()
