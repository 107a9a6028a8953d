"""The compile cache on disk: what is found, what is refused, and what a killed or refused writer leaves."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kimigraph
from kimigraph.ir.manifest import Manifest, record_file
from kimigraph.runtime.compile_cache import CompileCache, Entry, digest

FRONT = {"model": {"a": 1}, "flags": {"seed": 0}}
GRAPH = {"graph": "text", "target": "cpu:reference"}


def make_entry(directory: Path, text: str = "step = 1\n", graph: dict[str, Any] | None = None) -> Entry:
    artifact, dumps = directory / "artifact", directory / "dumps"
    artifact.mkdir(parents=True)
    dumps.mkdir()
    (artifact / "program.py").write_text(text)
    (dumps / "000-capture.py").write_text("captured\n")
    Manifest("toy", "decode", "b1", "cpu:reference", files=(record_file(artifact, "program.py"),)).write(artifact)
    return Entry(graph or GRAPH, artifact, dumps, {"phase": "decode"})


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return make_entry(tmp_path / "made")


@pytest.fixture
def cache(cache_root: Path, entry: Entry) -> CompileCache:
    cache = CompileCache()
    cache.store(FRONT, entry)
    assert cache.warning == ""
    return cache


def test_what_was_stored_is_found_by_both_keys(cache: CompileCache, cache_root: Path, entry: Entry) -> None:
    for hit in (cache.find_front(FRONT), cache.find_graph(digest(GRAPH))):
        assert hit.entry is not None
        assert (hit.entry / "artifact" / "program.py").read_text() == "step = 1\n"
        assert (hit.entry / "dumps" / "000-capture.py").read_text() == "captured\n"
        assert hit.report() == {"phase": "decode"}
        assert json.loads((hit.entry / "key.json").read_text()) == GRAPH
    assert not list((cache_root / ".staging").iterdir())
    assert cache_root.stat().st_mode & 0o777 == 0o700


def test_another_request_is_a_miss(cache: CompileCache) -> None:
    found = cache.find_front({**FRONT, "flags": {"seed": 1}})
    assert (found.entry, found.reason) == (None, "not compiled before")


def test_the_order_of_components_is_no_part_of_a_key() -> None:
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest({"a": 1}) != digest({"a": "1"})


def graph_files(root: Path) -> Path:
    return root / "v1" / "graph" / digest(GRAPH)[:2] / digest(GRAPH)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "program cut short": lambda entry: (entry / "artifact" / "program.py").write_text("step"),
    "program changed": lambda entry: (entry / "artifact" / "program.py").write_text("step = 2\n"),
    "program missing": lambda entry: (entry / "artifact" / "program.py").unlink(),
    "manifest cut short": lambda entry: (entry / "artifact" / "manifest.json").write_text('{"files": ['),
    "manifest changed": lambda entry: (entry / "artifact" / "manifest.json").write_text(
        (entry / "artifact" / "manifest.json").read_text().replace('"seed": 0', '"seed": 1')
    ),
    "report empty": lambda entry: (entry / "report.json").write_text(""),
    "report of another form": lambda entry: (entry / "report.json").write_text("[]"),
    "key of another entry": lambda entry: (entry / "key.json").write_text('{"graph": "other"}'),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_entry_is_set_aside_and_a_miss_with_its_reason(
    cache: CompileCache, cache_root: Path, entry: Entry, damage: str
) -> None:
    DAMAGES[damage](graph_files(cache_root))
    found = cache.find_front(FRONT)
    assert found.entry is None
    assert found.reason.startswith("corrupt entry set aside: ")
    assert not graph_files(cache_root).exists()
    assert len(list((cache_root / ".bad").iterdir())) == 1
    cache.store(FRONT, entry)
    assert cache.find_front(FRONT).entry is not None


@pytest.mark.parametrize("text", ["", "[]", '{"graph_key": "../../etc"}', '{"graph_key"', "\ufeff{}"])
def test_a_corrupt_front_entry_is_a_miss_and_is_written_anew(
    cache: CompileCache, cache_root: Path, entry: Entry, text: str
) -> None:
    (path,) = (cache_root / "v1" / "front").rglob("*.json")
    path.write_text(text)
    found = cache.find_front(FRONT)
    assert found.entry is None
    assert "corrupt entry" in found.reason
    cache.store(FRONT, entry)
    assert cache.find_front(FRONT).entry is not None


def test_a_reading_cache_leaves_everything_as_it_is(cache: CompileCache, cache_root: Path, tmp_path: Path) -> None:
    reader = CompileCache(mode="readonly")
    assert reader.find_front(FRONT).entry is not None
    reader.store(FRONT, make_entry(tmp_path / "other", graph={"graph": "other"}))
    assert reader.find_graph(digest({"graph": "other"})).entry is None
    (graph_files(cache_root) / "artifact" / "program.py").write_text("step = 2\n")
    before = sorted(cache_root.rglob("*"))
    found = reader.find_front(FRONT)
    assert found.entry is None and found.reason.startswith("corrupt entry: ")
    assert sorted(cache_root.rglob("*")) == before


def test_off_neither_reads_nor_writes(cache: CompileCache, cache_root: Path, tmp_path: Path) -> None:
    before = sorted(cache_root.rglob("*"))
    off = CompileCache(mode="off")
    assert off.find_front(FRONT).entry is None and off.find_front(FRONT).reason == "--cache off"
    assert off.find_graph(digest(GRAPH)).entry is None
    off.store(FRONT, make_entry(tmp_path / "other", graph={"graph": "other"}))
    assert sorted(cache_root.rglob("*")) == before


def test_refresh_replaces(cache: CompileCache, cache_root: Path, tmp_path: Path) -> None:
    fresh = CompileCache(mode="refresh")
    assert fresh.find_front(FRONT).reason == "--cache refresh"
    fresh.store(FRONT, make_entry(tmp_path / "newer", "step = 2\n"))
    hit = cache.find_front(FRONT)
    assert hit.entry is not None and (hit.entry / "artifact" / "program.py").read_text() == "step = 2\n"
    assert not list((cache_root / ".staging").iterdir())


def test_the_first_of_two_writers_wins(cache: CompileCache, cache_root: Path, tmp_path: Path) -> None:
    cache.store(FRONT, make_entry(tmp_path / "later", "step = 2\n"))
    hit = cache.find_front(FRONT)
    assert cache.warning == ""
    assert hit.entry is not None and (hit.entry / "artifact" / "program.py").read_text() == "step = 1\n"
    assert not list((cache_root / ".staging").iterdir())


def test_a_root_that_cannot_be_written_works_with_a_warning(tmp_path: Path, entry: Entry) -> None:
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file" / "root")
    assert cache.find_front(FRONT).reason == "not compiled before"
    cache.store(FRONT, entry)
    assert "cannot be written, so nothing was kept" in cache.warning


def test_leftovers_of_killed_writers_are_swept_after_an_hour(
    cache: CompileCache, cache_root: Path, entry: Entry
) -> None:
    old, young = cache_root / ".staging" / "1-old", cache_root / ".staging" / "2-young"
    for path, age in ((old, 3700), (young, 10)):
        path.mkdir()
        os.utime(path, (time.time() - age,) * 2)
    cache.store(FRONT, entry)
    assert not old.exists() and young.exists()


KILLED = """
import os, shutil, sys
from pathlib import Path
import kimigraph.runtime.compile_cache as module
moment = sys.argv[2]
original = getattr(module, moment) if hasattr(module, moment) else None
def killed(*args, **kwargs):
    if moment == "_sync_tree":
        os._exit(9)
    original(*args, **kwargs)
    os._exit(9)
setattr(module, moment, killed)
made = Path(sys.argv[1])
cache = module.CompileCache()
cache.store({"front": 1}, module.Entry({"graph": "killed"}, made / "artifact", made / "dumps", {}))
"""


@pytest.mark.parametrize("moment", ["_write_json", "_sync_tree"])
def test_a_killed_writer_leaves_no_entry(cache_root: Path, tmp_path: Path, moment: str) -> None:
    made = make_entry(tmp_path / "made", graph={"graph": "killed"})
    environment = {**os.environ, "PYTHONPATH": str(Path(kimigraph.__file__).parent.parent)}
    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "made"), moment], env=environment, check=False)
    assert ran.returncode == 9
    assert list((cache_root / ".staging").iterdir())
    cache = CompileCache()
    assert cache.find_graph(digest({"graph": "killed"})).reason == "not compiled before"
    assert cache.find_front({"front": 1}).reason == "not compiled before"
    cache.store({"front": 1}, made)
    assert cache.find_front({"front": 1}).entry is not None
