"""``kimigraph cache``: what it prints, as text and as JSON, and its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from kimigraph.runtime.cache import CompileCache, Entry, Place, digest

GRAPH = {"graph": "text", "flags": {"seed": 0}}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path / "root"))
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "program.py").write_text("step = 1\n")
    title = {"model": "toy", "shape": "decode-b1", "target": "cpu:reference"}
    CompileCache().store({"model": 1}, Entry(GRAPH, tmp_path / "artifact", tmp_path / "dumps", {}, title))
    return tmp_path / "root"


def test_path(cli: Any, root: Path) -> None:
    assert cli("cache", "path").stdout == f"{root}\n"
    assert json.loads(cli("cache", "path", "--json").stdout) == {"path": str(root)}


def test_list(cli: Any, root: Path) -> None:
    (entry,) = json.loads(cli("cache", "list", "--json").stdout)
    assert (entry["key"], entry["model"], entry["readable"]) == (digest(GRAPH), "toy", True)
    text = cli("cache", "list").stdout
    assert digest(GRAPH)[:12] in text and "toy decode-b1" in text and "1 entries" in text


def test_show(cli: Any, root: Path) -> None:
    document = json.loads(cli("cache", "show", digest(GRAPH)[:8], "--json").stdout)
    assert document["components"] == GRAPH
    text = cli("cache", "show", digest(GRAPH)[:8]).stdout
    assert "components of the key" in text and "artifact/program.py" in text
    assert cli("cache", "show", "nothing").exit_code == 2


def test_verify_exits_with_5_for_a_corrupt_entry(cli: Any, root: Path) -> None:
    assert cli("cache", "verify").exit_code == 0
    (Place(root).graph(digest(GRAPH)) / "artifact" / "program.py").write_text("step = 2\n")
    done = cli("cache", "verify", "--json")
    assert done.exit_code == 5 and json.loads(done.stdout)["corrupt"][0]["key"] == digest(GRAPH)
    assert "was changed" in cli("cache", "verify").stdout


def test_prune_and_clear(cli: Any, root: Path) -> None:
    assert json.loads(cli("cache", "prune", "--json").stdout)["removed"] == []
    assert cli("cache", "prune", "--max-size", "tiny").exit_code == 2
    assert json.loads(cli("cache", "prune", "--max-size", "0", "--json").stdout)["removed"] == [digest(GRAPH)]
    assert json.loads(cli("cache", "clear", "--json").stdout) == {"removed": 0, "freed": 0}
    assert "0 entries" in cli("cache", "list").stdout


def test_a_cache_of_somebody_else_is_a_usage_error(cli: Any, root: Path) -> None:
    root.chmod(0o777)
    done = cli("cache", "list")
    assert done.exit_code == 2 and "can be written by everybody" in done.stderr


def test_why_names_what_differs_and_compiles_nothing(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real compiler behind it."""
    from kimigraph.compiler import compile_source
    from kimigraph.ir.config import CompileConfig

    monkeypatch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path / "root"))
    monkeypatch.setattr("kimigraph.keys.compiler_hash", lambda: {"passes": "1"})
    source = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
    options = ("--context", "32", "--target", "cpu:reference")
    first = json.loads(cli("cache", "why", source, *options, "--json").stdout)
    assert (first["status"], first["reason"], first["differences"]) == ("miss", "not compiled before", [])
    compile_source(source, [CompileConfig(target="cpu:reference", context=32)], tmp_path / "out", lambda _: None)
    assert json.loads(cli("cache", "why", source, *options, "--json").stdout)["status"] == "hit"
    other = json.loads(cli("cache", "why", source, *options, "--seed", "3", "--json").stdout)
    assert other["status"] == "miss" and len(other["nearest"]) == 64
    assert other["differences"] == [{"component": "flags.seed", "stored": 0, "asked": 3}]
    monkeypatch.setattr("kimigraph.keys.compiler_hash", lambda: {"passes": "2"})
    text = cli("cache", "why", source, *options).stdout
    assert text.startswith("miss: ") and "compiler.passes" in text
