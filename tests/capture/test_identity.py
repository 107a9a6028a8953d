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


def keys_elsewhere(sources: list[str], seed: str, home: Path) -> list[dict[str, object]]:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "HOME": str(home), "PORT": seed}
    ran = subprocess.run(
        [sys.executable, "-c", PRINT_KEYS, *sources], capture_output=True, text=True, env=environment, check=True
    )
    return json.loads(ran.stdout.splitlines()[-1])


def test_equal_in_other_processes_places_and_orders(tmp_path: Path) -> None:
    kimi, deepseek = write_model(tmp_path / "a", KIMI), write_model(tmp_path / "b", DEEPSEEK)
    copied = tmp_path / "elsewhere" / "a"
    shutil.copytree(kimi, copied)
    os.utime(copied / "config.json", (1, 1))
    here = load_source(kimi, CONFIG).key
    first = keys_elsewhere([kimi, deepseek], "1", tmp_path)
    second = keys_elsewhere([deepseek, str(copied)], "2", tmp_path / "elsewhere")
    assert first[0] == here == second[1]
    assert first[1] == second[0]
    assert str(tmp_path) not in json.dumps(first)


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
    """An edit of the module's file, of a helper it uses, or of a constant there is another key; building first is not."""
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
