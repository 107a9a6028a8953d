"""Failures of public compile caches, rows H3 to H16: what each of them did wrong is right here."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kimigraph
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.keys import device_components, toolchain
from kimigraph.runtime.cache import Place

SOURCE = """
import os
import torch

SCALE = float(os.environ.get("SCALE", "1"))
TABLE = torch.tensor([SCALE, 2.0])

class Scaled(torch.nn.Module):
    offset = SCALE

    def forward(self, x):
        return x * SCALE + self.offset + TABLE.sum()

def made(factor):
    class Times(torch.nn.Module):
        def forward(self, x):
            return x * factor
    return Times()

def scaled():
    return Scaled(), (torch.ones(2, 3),)

def times():
    return made(SCALE), (torch.ones(2, 3),)
"""
COMPILE = """
import sys
from pathlib import Path
import kimigraph.keys as keys
keys.compiler_hash = lambda: "a compiler"
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
for source in sys.argv[2:]:
    config = CompileConfig(target="cpu:reference", report=False)
    report = compile_source(source, [config], Path(sys.argv[1]) / source.replace(":", "_"), lambda _: None)[0]
    print("said", report.cache["status"], report.cache["key"])
"""


@pytest.fixture
def ran(tmp_path: Path, python: Callable[..., str]) -> Callable[..., list[list[str]]]:
    """Compile sources in a process of its own -> (status, key) of each."""
    (tmp_path / "around.py").write_text(SOURCE)

    def run(*sources: str, **environment: str) -> list[list[str]]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        text = python(COMPILE, out, *sources, cwd=tmp_path, **environment)
        return [line.split()[1:] for line in text.splitlines() if line.startswith("said")]

    return run


def test_h3_h4_h5_h16_globals_and_closures_count_and_nothing_else_of_a_process_does(ran: Any) -> None:
    """The text of the source stays; what its globals, class attributes and closures hold is from the environment."""
    sources = ("around:scaled", "around:times")
    first = ran(*sources, SCALE="128")
    assert [status for status, _ in first] == ["miss", "miss"]
    # H5: in another order; H16: a variable that is 0 is as one that is not set.
    again = ran(*sources[::-1], SCALE="128", PYTHONHASHSEED="3", TRITON_INTERPRET="0", KIMIGRAPH_TRACEBACK="0")
    assert again[::-1] == [["hit", key] for _, key in first]
    other = ran(*sources, SCALE="256")
    assert [status for status, _ in other] == ["miss", "miss"]
    assert not {key for _, key in first} & {key for _, key in other}


def test_h3_a_global_changed_at_run_time_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Any
) -> None:
    (tmp_path / "around.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "around", raising=False)
    assert compiled("around:scaled").cache["status"] == "miss"
    assert compiled("around:scaled").cache["status"] == "hit"
    around = sys.modules["around"]
    for change in (
        lambda: vars(around).update(SCALE=3.0),
        lambda: setattr(vars(around)["Scaled"], "offset", 5.0),
        lambda: vars(around)["TABLE"].mul_(2),
    ):
        change()
        assert compiled("around:scaled").cache["status"] == "miss"
        assert compiled("around:scaled").cache["status"] == "hit"
    sys.modules.pop("around")


def test_h4_models_that_differ_in_a_closure_have_entries_of_their_own(cache_root: Path) -> None:
    def made(factor: float) -> nn.Module:
        class Times(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * factor

        return Times()

    x = torch.randn(3)
    for factor in (128.0, 256.0):
        config = CompileConfig(target="cpu:reference", report=False)
        torch.testing.assert_close(kimigraph.optimize(made(factor), (x,), config)(x), x * factor)
    assert len(list(Place(cache_root).entries())) == 2


def test_h5_keys_do_not_depend_on_what_was_compiled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Any
) -> None:
    (tmp_path / "around.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    keys: list[dict[str, str]] = []
    for names in (("scaled", "times"), ("times", "scaled")):
        monkeypatch.delitem(sys.modules, "around", raising=False)
        monkeypatch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path / names[0]))
        reports = {name: compiled(f"around:{name}", out=tmp_path / "made" / names[0] / name) for name in names}
        assert all(report.cache["status"] == "miss" for report in reports.values())
        keys.append({name: report.cache["key"] for name, report in reports.items()})
    assert keys[0] == keys[1]
    sys.modules.pop("around")


def test_h8_architectures_are_told_apart_and_it_is_that_of_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [SimpleNamespace(major=9, minor=0, multi_processor_count=132)]
    devices += [SimpleNamespace(major=10, minor=3, multi_processor_count=148)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)
    assert device_components("cuda") == {"arch": "sm_103", "multiprocessors": 148}
    targets = ("cuda:sm_80", "cuda:sm_86", "cuda:sm_90", "cuda:sm_100", "cuda:sm_103", "cuda", "cpu", "cpu:reference")
    keys = {str((target, device_components(target), toolchain(target))) for target in targets}
    assert len(keys) == len(targets)
    assert [device_components(target)["arch"] for target in targets[:3]] == ["sm_80", "sm_86", "sm_90"]


def test_h10_the_same_sizes_in_other_layouts_and_types_are_right(cache_root: Path) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float() * 2).sum(-1)

    base = torch.randn(33)
    given = {
        "contiguous": base[:32].view(4, 8),
        "from the second element": base[1:].view(4, 8),
        "transposed": base[:32].view(8, 4).T,
        "expanded": base[:8].expand(4, 8),
        "bfloat16": base[:32].view(4, 8).bfloat16(),
        "float16": base[:32].view(4, 8).half(),
    }
    config = CompileConfig(target="cpu:reference", report=False)
    model = Sum()
    compiled = kimigraph.optimize(model, (given["contiguous"],), config)
    for x in given.values():
        torch.testing.assert_close(compiled(x), model(x))
    assert len(list(Place(cache_root).entries())) >= 4  # on a CPU alignment is no part of a program


def test_h12_a_model_of_a_long_name_in_a_deep_directory(kimi: str, tmp_path: Path, cache_root: Path) -> None:
    deep = tmp_path.joinpath(*["d" * 60] * 8)
    deep.mkdir(parents=True)
    (deep / ("m" * 200)).symlink_to(kimi)
    config = CompileConfig(target="cpu:reference", context=8, report=False)
    report = compile_source(str(deep / ("m" * 200)), [config], tmp_path / "out", lambda _: None)[0]
    assert report.cache["status"] == "miss"
    longest = max((len(name) for _, folders, names in os.walk(cache_root) for name in (*folders, *names)), default=0)
    assert 0 < longest < 143


def test_h15_an_entry_that_cannot_be_read_is_no_miss_for_ever(compiled: Any, toy: str, cache_root: Path) -> None:
    assert compiled(toy).cache["status"] == "miss"
    (entry,) = Place(cache_root).entries()
    (entry / "report.json").write_bytes(b"\xff")
    assert [compiled(toy).cache["status"] for _ in range(2)] == ["miss", "hit"]
