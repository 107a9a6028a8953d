"""What the cache keeps when it may not keep all, and what it says of itself."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kimigraph.ir.errors import UsageError
from kimigraph.ir.sizes import format_bytes, parse_bytes
from kimigraph.runtime.cache import CompileCache, Entry, Place, digest
from kimigraph.runtime.cache.disk import Disk
from kimigraph.runtime.cache.eviction import prune
from kimigraph.runtime.cache.listing import clear_cache, list_entries, prune_entries, show_entry, verify_entries


def graph(number: int) -> dict[str, Any]:
    return {"graph": f"graph {number}"}


def front(number: int) -> dict[str, Any]:
    return {"model": {"number": number}}


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "made" / "artifact").mkdir(parents=True)
    (tmp_path / "made" / "artifact" / "program.py").write_bytes(b"x" * 10_000)
    return tmp_path / "made"


def store(made: Path, number: int, cache: CompileCache | None = None) -> None:
    entry = Entry(graph(number), made / "artifact", made / "dumps", {}, {"model": f"m{number}", "shape": "b1"})
    (cache or CompileCache()).store(front(number), entry)


def age(root: Path, number: int, seconds: float) -> None:
    path = Place(root).graph(digest(graph(number))) / "entry.json"
    os.utime(path, (time.time() - seconds,) * 2)


def held(root: Path) -> set[int]:
    names = {digest(graph(number)): number for number in range(600)}
    return {names[path.name] for path in Place(root).entries()}


def test_five_hundred_shapes_stay_below_the_limit(
    cache_root: Path, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one stored last is always there; entries and what points to them go together."""
    monkeypatch.setenv("KIMIGRAPH_CACHE_LIMIT", "100K")
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a thousand of them take minutes on some disks
    cache = CompileCache()
    for number in range(500):
        store(made, number, cache)
        if number % 50 == 0 or number > 490:
            assert cache.find_front(front(number)).entry is not None
            assert sum(path.stat().st_size for path in cache_root.rglob("*") if path.is_file()) < 130_000
            assert len(list(Place(cache_root).front_files())) == len(list(Place(cache_root).entries())) <= 10
    assert CompileCache().find_front(front(0)).entry is None


def test_the_entry_unused_for_longest_goes_first_and_use_counts(cache_root: Path, made: Path) -> None:
    for number in range(4):
        store(made, number)
        age(cache_root, number, 10_000 - number)
    assert CompileCache().find_front(front(0)).entry is not None  # its stamp is renewed: it is hours old
    prune(Place(cache_root), Disk(), 25_000)
    assert held(cache_root) == {0, 3}
    assert CompileCache().find_front(front(1)).reason.startswith("not compiled before")


def test_a_stamp_is_renewed_hourly_at_most_and_not_by_readers(cache_root: Path, made: Path) -> None:
    store(made, 0)
    path = Place(cache_root).graph(digest(graph(0))) / "entry.json"
    for seconds, mode, renewed in ((1800, "use", False), (4000, "readonly", False), (4000, "use", True)):
        age(cache_root, 0, seconds)
        before = path.stat().st_mtime
        assert CompileCache(mode=mode).find_front(front(0)).entry is not None
        assert (path.stat().st_mtime > before + 1) == renewed


def test_an_entry_that_cannot_be_read_goes_first(cache_root: Path, made: Path) -> None:
    for number in range(3):
        store(made, number)
        age(cache_root, number, 10_000)
    record = Place(cache_root).graph(digest(graph(2))) / "entry.json"
    record.write_text("{")
    prune(Place(cache_root), Disk(), 30_000)
    assert held(cache_root) == {0, 1}


def test_one_process_prunes_at_a_time(cache_root: Path, made: Path) -> None:
    from kimigraph.runtime.cache.locks import exclusive

    store(made, 0)
    with exclusive(Place(cache_root).locks / "prune.lock", 0) as alone:
        assert alone
        assert prune(Place(cache_root), Disk(), 0) == []
    assert len(prune(Place(cache_root), Disk(), 0)) == 1


@pytest.mark.parametrize(("text", "size"), [("1500", 1500), ("2K", 2048), ("3m", 3 << 20), ("20G", 20 << 30)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1.5G", "lots", "1KB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        parse_bytes(text)


def test_sizes_for_people() -> None:
    assert [format_bytes(size) for size in (5, 1536, 3 << 20, 5 << 30)] == ["5 B", "1.5 KiB", "3 MiB", "5 GiB"]


def test_listing_showing_verifying_and_clearing(cache_root: Path, made: Path) -> None:
    for number in range(3):
        store(made, number)
        age(cache_root, number, 100 * (3 - number))
    place = Place(cache_root)
    assert [entry["model"] for entry in list_entries(place)] == ["m2", "m1", "m0"]
    key = digest(graph(1))
    shown = show_entry(place, key[:10])
    assert shown["key"] == key and shown["components"] == graph(1) and shown["asked_as"] == [digest(front(1))]
    assert [item["path"] for item in shown["files"]] == ["key.json", "report.json", "artifact/program.py"]
    with pytest.raises(UsageError, match="no entry has a key that begins with 'xyz'"):
        show_entry(place, "xyz")
    with pytest.raises(UsageError, match="3 entries have"):
        show_entry(place, "")
    assert verify_entries(place) == {"root": str(cache_root), "checked": 3, "corrupt": [], "foreign": []}
    (place.graph(key) / "artifact" / "program.py").write_text("y")
    (place.graph(key) / "artifact" / "more.py").write_text("z")
    (cache_root / "v2" / "notes").write_text("mine")
    found = verify_entries(place)
    assert [item["key"] for item in found["corrupt"]] == [key]
    assert "has 1 bytes instead of 10000" in found["corrupt"][0]["reason"]
    assert prune_entries(place, 25_000)["entries"] == 2
    cleared = clear_cache(place)
    assert cleared["removed"] == 2 and not list(place.entries()) and not list(place.front_files())
    assert json.dumps(cleared)


def test_keys_do_not_depend_on_what_was_stored_before(cache_root: Path, made: Path, tmp_path: Path) -> None:
    for order in ((1, 2), (2, 1)):
        root = tmp_path / f"root{order[0]}"
        for number in order:
            store(made, number, CompileCache(root))
        assert {path.name for path in Place(root).entries()} == {digest(graph(1)), digest(graph(2))}
