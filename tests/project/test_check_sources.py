"""The house rules of scripts/check_sources.py catch what they are for."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rules() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sources", ROOT / "scripts" / "check_sources.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import pickle\n", 1),
        ("x = 1\nfrom cloudpickle import dumps\n", 2),
        ("def f():\n    import marshal\n", 2),
        ("import os, dill.source\n", 1),
        ("import torch\ntorch.load('w')\n", 2),
        ("import torch\ntorch.load('w', weights_only=False)\n", 2),
        ("x = 1\n" * 501, 501),
        ("x = f()  # type: " + "ignore\n", 1),
        ("x = f()  # no" + "qa: E501\n", 1),
        ("# pyright: basic\n# untyped\n", 1),
    ],
)
def test_a_broken_rule_is_found_in_its_line(rules: ModuleType, text: str, line: int) -> None:
    found = list(rules.check_file("passes/example.py", text))
    assert [where for where, _ in found] == [line]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load('w', weights_only=True)\n",
        "import json\njson.load(open('x'))\n",
        "def load(pickled):\n    'Never a pickle.'\n",
        "x = 1\n" * 500,
    ],
)
def test_what_is_allowed_passes(rules: ModuleType, text: str) -> None:
    assert list(rules.check_file("passes/example.py", text)) == []


def test_a_file_of_an_adapter_may_be_exempt_from_strict_types_with_a_reason(rules: ModuleType) -> None:
    text = "# pyright: basic\n# Reason: the library has no types\n"
    assert rules.exemption("kimigraph/adapters/x.py", text) == "the library has no types"
    assert list(rules.check_file("kimigraph/adapters/x.py", text)) == []
    assert rules.exemption("kimigraph/adapters/x.py", "# pyright: basic\nimport os\n") is None
    assert list(rules.check_file("kimigraph/adapters/x.py", "# pyright: basic\nimport os\n")) != []


def test_files_are_seen_once_under_their_real_path(rules: ModuleType) -> None:
    files = rules.python_files(ROOT)
    assert "passes/base.py" in files and "kimigraph/ir/errors.py" in files
    assert not [path for path in files if path.startswith("kimigraph/passes/")]
