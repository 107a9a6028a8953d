"""The compile cache on disk: what is found, what is refused, and where entries go that the disk does not take."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimigraph.ir.errors import CorruptArtifactError
from kimigraph.runtime.cache import ARTIFACT, DUMPS, CompileCache, Entry, Place, digest
from kimigraph.runtime.cache.disk import Disk
from kimigraph.runtime.cache.memory import overflow_of

GRAPH: dict[str, Any] = {"graph": "text", "target": "cpu:reference"}
FRONT: dict[str, Any] = {"model": {"a": 1}, "flags": {"seed": 0}}


def make_entry(directory: Path, text: str = "step = 1\n", graph: dict[str, Any] | None = None) -> Entry:
    artifact, dumps = directory / "artifact", directory / "dumps"
    (artifact / "kernels").mkdir(parents=True)
    dumps.mkdir()
    (artifact / "program.py").write_text(text)
    (artifact / "manifest.json").write_text("{}")
    (artifact / "kernels" / "step.cubin").write_bytes(bytes(range(256)))
    (dumps / "000-capture.py").write_text("captured\n")
    return Entry(graph or GRAPH, artifact, dumps, {"phase": "decode"}, {"model": "toy"})


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return make_entry(tmp_path / "made")


@pytest.fixture
def cache(cache_root: Path, entry: Entry) -> CompileCache:
    cache = CompileCache()
    cache.store(FRONT, entry)
    assert cache.warning == ""
    return cache


def program_of(cache: CompileCache, front: dict[str, Any] = FRONT) -> bytes | None:
    found = cache.find_front(front)
    return None if found.entry is None else found.entry.files["artifact/program.py"]


def entry_directory(root: Path) -> Path:
    return Place(root).graph(digest(GRAPH))


def test_what_was_stored_is_found_by_both_keys(cache: CompileCache, cache_root: Path, tmp_path: Path) -> None:
    for number, hit in enumerate((cache.find_front(FRONT, dumps=True), cache.find_graph(digest(GRAPH), dumps=True))):
        assert hit.entry is not None
        restored = tmp_path / str(number)
        assert hit.entry.restore(ARTIFACT, restored) == ["kernels/step.cubin", "manifest.json", "program.py"]
        assert (restored / "kernels" / "step.cubin").read_bytes() == bytes(range(256))
        assert hit.entry.restore(DUMPS, restored) == ["000-capture.py"]
        assert (hit.entry.report, hit.entry.components) == ({"phase": "decode"}, GRAPH)
    assert json.loads((entry_directory(cache_root) / "key.json").read_text()) == GRAPH
    assert not list((cache_root / ".staging").iterdir())
    assert cache_root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("held", [False, True])
def test_an_entry_without_dumps_serves_all_but_those_who_read_them(
    cache_root: Path, entry: Entry, tmp_path: Path, held: bool
) -> None:
    """Compiled again for them, it is replaced; one that has dumps is not replaced by one without."""
    if held:
        cache_root.write_text("a file, no directory")
    dumpless = replace(entry, dumps=tmp_path / "none")
    cache = CompileCache()
    cache.store(FRONT, dumpless)
    assert program_of(cache) == b"step = 1\n"
    for found in (cache.find_front(FRONT, dumps=True), cache.find_graph(digest(GRAPH), dumps=True)):
        assert found.entry is None and found.reason.startswith("the entry has no dumps")
    for kept in (entry, dumpless):
        cache.store(FRONT, kept)
        found = cache.find_front(FRONT, dumps=True).entry
        assert found is not None and found.restore(DUMPS, tmp_path / "restored") == ["000-capture.py"]


def test_a_check_compares_dumps_where_both_have_some(cache_root: Path, entry: Entry, tmp_path: Path) -> None:
    CompileCache().store(FRONT, entry)
    check = CompileCache(mode="check")
    check.store(FRONT, replace(entry, dumps=tmp_path / "none"))
    assert check.note == "equal to the stored entry"
    (entry.dumps / "000-capture.py").write_text("captured otherwise\n")
    with pytest.raises(CorruptArtifactError, match="dumps/000-capture"):
        check.store(FRONT, entry)


def test_a_miss_names_the_components_that_differ_from_the_nearest_entry(cache: CompileCache) -> None:
    found = cache.find_front({**FRONT, "flags": {"seed": 1}})
    assert found.entry is None
    assert found.reason == "not compiled before; the nearest entry differs in flags.seed (0 there, 1 here)"
    far = cache.find_front({"model": {"a": 2, "b": 3}, "flags": {"seed": 1, "more": "x" * 100}})
    assert "and 1 more" in far.reason and "x" * 17 not in far.reason


def test_an_empty_cache_only_says_that_it_is_new(cache_root: Path) -> None:
    assert CompileCache().find_front(FRONT).reason == "not compiled before"


def test_the_order_of_components_is_no_part_of_a_key() -> None:
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest({"a": 1}) != digest({"a": "1"})
    assert digest({"a": (1, 2)}) == digest({"a": [1, 2]})


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "program cut short": lambda entry: (entry / "artifact" / "program.py").write_text("step"),
    "program changed": lambda entry: (entry / "artifact" / "program.py").write_text("step = 2\n"),
    "program missing": lambda entry: (entry / "artifact" / "program.py").unlink(),
    "program a directory": lambda entry: (
        (entry / "artifact" / "program.py").unlink(),
        (entry / "artifact" / "program.py").mkdir(),
    ),
    "record missing": lambda entry: (entry / "entry.json").unlink(),
    "record cut short": lambda entry: (entry / "entry.json").write_text('{"body": {'),
    "record of another form": lambda entry: (entry / "entry.json").write_text("[]"),
    "record changed": lambda entry: (entry / "entry.json").write_text(
        (entry / "entry.json").read_text().replace("toy", "boy")
    ),
    "report empty": lambda entry: (entry / "report.json").write_text(""),
    "key of another entry": lambda entry: (entry / "key.json").write_text('{"graph": "other"}'),
    "nothing but the folder": lambda entry: (shutil.rmtree(entry), entry.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_entry_is_set_aside_and_a_miss_with_its_reason(
    cache: CompileCache, cache_root: Path, entry: Entry, damage: str
) -> None:
    DAMAGES[damage](entry_directory(cache_root))
    found = cache.find_front(FRONT)
    assert found.entry is None
    assert found.reason.startswith("corrupt entry set aside: ")
    assert not entry_directory(cache_root).exists()
    assert len(list((cache_root / ".bad").iterdir())) == 1
    cache.store(FRONT, entry)
    assert program_of(cache) == b"step = 1\n"


def test_no_flipped_bit_goes_unnoticed(cache: CompileCache, cache_root: Path, entry: Entry) -> None:
    """One bit in each of 16 places of every file, the front key's too: a miss, or for dumps a miss when they are asked
    for; never another program."""
    names = [path.relative_to(cache_root) for path in (cache_root / "v2").rglob("*") if path.is_file()]
    assert len(names) == 8
    for name in names:
        whole = (cache_root / name).read_bytes()
        for number in range(16):
            position = number * len(whole) // 16
            flipped = bytearray(whole)
            flipped[position] ^= 1 << (number % 8)
            (cache_root / name).write_bytes(flipped)
            found = cache.find_front(FRONT, dumps="dumps" in name.parts)
            if found.entry is not None:  # a blank between two words of the JSON
                assert json.loads(whole) == json.loads(flipped)
                assert found.entry.files["artifact/program.py"] == b"step = 1\n"
            else:
                assert "corrupt" in found.reason, (name, position)
            shutil.rmtree(cache_root)
            cache.store(FRONT, entry)


@pytest.mark.parametrize("text", ["", "[]", '{"graph_key": "../../etc"}', '{"body"', "\ufeff{}", "[" * 100_000])
def test_a_corrupt_front_entry_is_a_miss_and_is_written_anew(
    cache: CompileCache, cache_root: Path, entry: Entry, text: str
) -> None:
    (path,) = Place(cache_root).front_files()
    path.write_text(text)
    assert cache.find_front(FRONT).entry is None
    assert "corrupt entry" in cache.find_front(FRONT).reason
    cache.store(FRONT, entry)
    assert program_of(cache) == b"step = 1\n"


def bomb(path: Path) -> bytes:
    """A pickle that makes a directory when it is loaded."""
    return f"cos\nmkdir\n(V{path}\ntR.".encode()


def test_planted_pickles_and_foreign_files_are_neither_read_nor_restored(
    cache: CompileCache, cache_root: Path, tmp_path: Path
) -> None:
    exploding = bomb(tmp_path / "exploded")
    planted = [cache_root / "v2", entry_directory(cache_root), entry_directory(cache_root) / "artifact"]
    for folder in planted:
        for name in ("data.pkl", "program.pyc", "__pycache__/program.cpython-311.pyc"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(exploding)
    (cache_root / "v2" / "front" / "ab").mkdir(exist_ok=True)
    (cache_root / "v2" / "front" / "ab" / "notes.json").write_bytes(exploding)
    (cache_root / "v2" / "graph" / "zz").write_bytes(exploding)
    found = cache.find_front(FRONT)
    assert found.entry is not None
    assert found.entry.restore(ARTIFACT, tmp_path / "out") == ["kernels/step.cubin", "manifest.json", "program.py"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["kernels", "manifest.json", "program.py"]
    assert not (tmp_path / "exploded").exists()
    assert {"v2/front/ab/notes.json", "v2/graph/zz"} <= set(Place(cache_root).foreign())


def test_a_root_of_another_user_is_neither_read_nor_written(
    cache: CompileCache, cache_root: Path, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = cache_root.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1 if owner else 1)
    if owner == 0:
        os.chown(cache_root, 4242, -1)
    stranger = CompileCache()
    found = stranger.find_front(FRONT)
    assert found.entry is None and "belongs to user" in found.reason and "choose another directory" in found.reason
    assert stranger.status == "bypass"
    before = sorted(cache_root.rglob("*"))
    stranger.store(FRONT, entry)
    assert sorted(cache_root.rglob("*")) == before
    assert "kept in memory" in stranger.warning
    assert program_of(stranger) == b"step = 1\n"


def test_a_root_that_everybody_can_write_is_left_alone(cache: CompileCache, cache_root: Path) -> None:
    cache_root.chmod(0o777)
    assert "can be written by everybody" in CompileCache().find_front(FRONT).reason
    cache_root.chmod(0o755)
    assert program_of(CompileCache()) == b"step = 1\n"


def test_a_reading_cache_leaves_everything_as_it_is(cache: CompileCache, cache_root: Path, tmp_path: Path) -> None:
    reader = CompileCache(mode="readonly")
    assert program_of(reader) == b"step = 1\n"
    reader.store(FRONT, make_entry(tmp_path / "other", graph={"graph": "other"}))
    assert reader.find_graph(digest({"graph": "other"})).entry is None
    (entry_directory(cache_root) / "artifact" / "program.py").write_text("step = 2\n")
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
    assert program_of(cache) == b"step = 2\n"
    assert not list((cache_root / ".staging").iterdir())


def test_the_first_of_two_writers_wins(cache: CompileCache, cache_root: Path, tmp_path: Path) -> None:
    cache.store(FRONT, make_entry(tmp_path / "later", "step = 2\n"))
    assert cache.warning == ""
    assert program_of(cache) == b"step = 1\n"
    assert not list((cache_root / ".staging").iterdir())


class FullDisk(Disk):
    """Fails at one step as a disk that is full or read-only does."""

    def __init__(self, at: str, error: int) -> None:
        super().__init__(self.fail)
        self.at, self.error = at, error

    def fail(self, step: str) -> None:
        if step == self.at:
            raise OSError(self.error, os.strerror(self.error))


@pytest.mark.parametrize("step", ["mkdir", "write", "write half", "fsync", "fsync directory", "rename", "replace"])
@pytest.mark.parametrize("error", ["ENOSPC", "EROFS", "EDQUOT"])
def test_a_disk_that_refuses_leaves_a_valid_cache_and_memory_takes_over(
    cache_root: Path, entry: Entry, step: str, error: str
) -> None:
    import errno

    cache = CompileCache(disk=FullDisk(step, getattr(errno, error)))
    cache.store(FRONT, entry)
    assert "cannot be written" in cache.warning and "kept in memory" in cache.warning
    hit = cache.find_front(FRONT)
    assert hit.entry is not None and hit.note == "held in memory"
    assert hit.entry.files["artifact/program.py"] == b"step = 1\n"
    cache.store({"model": 2}, entry)
    assert cache.warning == ""  # said once
    overflow_of(cache_root).entries.clear()
    overflow_of(cache_root).fronts.clear()
    CompileCache().store(FRONT, entry)
    assert program_of(CompileCache()) == b"step = 1\n"


def test_a_root_below_a_file_works_from_memory(tmp_path: Path, entry: Entry) -> None:
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file" / "root")
    assert cache.find_front(FRONT).reason == "not compiled before"
    cache.store(FRONT, entry)
    assert "cannot be written" in cache.warning
    assert program_of(cache) == b"step = 1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_file_system(tmp_path: Path, entry: Entry) -> None:
    root = tmp_path / "small"
    root.mkdir(mode=0o700)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "kg", str(root)], check=False)
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        (entry.artifact / "large.bin").write_bytes(bytes(200_000))
        cache = CompileCache(root)
        cache.store(FRONT, entry)
        assert "No space left" in cache.warning
        assert program_of(cache) == b"step = 1\n"
        assert not list(Place(root).entries()) and not list((root / ".staging").iterdir())
    finally:
        subprocess.run(["umount", str(root)], check=True)


def test_leftovers_of_killed_writers_are_swept_after_an_hour(
    cache: CompileCache, cache_root: Path, entry: Entry
) -> None:
    old, young = cache_root / ".staging" / "1-old", cache_root / ".staging" / "2-young"
    for path, age in ((old, 3700), (young, 10)):
        path.mkdir()
        os.utime(path, (time.time() - age,) * 2)
    cache.store(FRONT, entry)
    assert not old.exists() and young.exists()


def test_names_stay_short_for_models_with_long_names(cache_root: Path, tmp_path: Path) -> None:
    front = {"model": {"name": "m" * 300, "place": "deep/" * 60}}
    cache = CompileCache()
    cache.store(front, make_entry(tmp_path / "made", graph={"graph": "g" * 5000}))
    assert cache.warning == "" and cache.find_front(front).entry is not None
    assert max(len(path.name) for path in cache_root.rglob("*")) < 143
