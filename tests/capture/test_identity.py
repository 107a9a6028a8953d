"""The model's part of the cache key: equal across processes and places, different where the graph may differ."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import DEEPSEEK, KIMI, write_model

from kimigraph.capture import load_source
from kimigraph.ir.config import CompileConfig

CONFIG = CompileConfig(context=16)
PRINT_KEYS = """
import json, sys
from kimigraph.capture import load_source
from kimigraph.ir.config import CompileConfig
print(json.dumps([load_source(source, CompileConfig(context=16)).key for source in sys.argv[1:]]))
"""


def test_equal_in_other_processes_places_and_orders(tmp_path: Path) -> None:
    kimi, deepseek = write_model(tmp_path / "a", KIMI), write_model(tmp_path / "b", DEEPSEEK)
    here = [load_source(source, CONFIG).key for source in (deepseek, kimi)]
    moved = tmp_path / "elsewhere" / "a"
    shutil.copytree(kimi, moved)
    os.utime(moved / "config.json", (1, 1))
    environment = {**os.environ, "PYTHONHASHSEED": "7", "HOME": str(tmp_path), "MASTER_PORT": "4242"}
    command = [sys.executable, "-c", PRINT_KEYS, str(moved), deepseek]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == here[::-1]
    assert str(tmp_path) not in ran.stdout


@pytest.mark.parametrize("change", ["field", "seed", "dtype"])
def test_different_models_differ(tmp_path: Path, change: str) -> None:
    key = load_source(write_model(tmp_path / "a", KIMI), CONFIG).key
    document, seed, dtype = KIMI, 0, None
    if change == "field":
        document = {**KIMI, "routed_scaling_factor": 1.5}
    elif change == "seed":
        seed = 1
    else:
        dtype = "bfloat16"
    other = load_source(write_model(tmp_path / "b", document, seed), CompileConfig(context=16, dtype=dtype)).key
    assert key != other


def test_source_text_of_the_model_and_its_helpers_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit of a helper that the module's file uses is another key; an equal text is the same key again."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "edited"
    package.mkdir()
    (package / "__init__.py").write_text("")
    model = (
        "import torch\nfrom edited.helper import scaled\n"
        "class M(torch.nn.Module):\n    def forward(self, x):\n        return scaled(x)\n"
        "def make():\n    return M(), (torch.ones(2),)\n"
    )
    (package / "model.py").write_text(model)
    keys: list[object] = []
    for factor in ("2", "3", "3"):
        (package / "helper.py").write_text(f"FACTOR = {factor}\ndef scaled(x):\n    return x * FACTOR\n")
        for name in [name for name in sys.modules if name.partition(".")[0] == "edited"]:
            del sys.modules[name]
        keys.append(load_source("edited.model:make", CompileConfig()).key)
    assert keys[0] != keys[1] and keys[1] == keys[2]


def test_shapes_strides_and_types_of_arguments_differ() -> None:
    keys = {load_source(f"toys:{name}", CompileConfig()).shape_key for name in ("running_sum", "running_sum_of_views")}
    assert len(keys) == 2
