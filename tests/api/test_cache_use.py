"""The compile cache as a compilation uses it: what hits, what misses, and that a hit captures nothing."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kimigraph.compiler as compiler
from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.remarks import PassResult
from kimigraph.keys import SETTLED, front_components, graph_components, tree_hash
from kimigraph.passes import Pass, Pipeline, default_pipeline
from kimigraph.runtime.cache import Place, digest

VALID: dict[str, Any] = {
    "target": "cpu",
    "phase": "prefill",
    "tokens": 2,
    "context": 16,
    "dtype": "bfloat16",
    "opt_level": 1,
    "passes": "canonicalize",
    "disabled_passes": ("raise-kda",),
    "required_fusions": ("raise-kda",),
    "stop_after": "raise-kda",
    "overrides": (("index_topk", "4"),),
}
"""Another value for the fields that are read while a key is made."""


def another(name: str) -> Any:
    """A value of the field that is not its default."""
    default = getattr(CompileConfig(), name)
    if name in VALID:
        return VALID[name]
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int) else (default, "another")


FRONT_KEY = """
import sys
import kimigraph.keys as keys
keys.compiler_hash = lambda: "a compiler"
from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.keys import front_components, graph_components
from kimigraph.passes import default_pipeline
from kimigraph.runtime.cache import digest
config = CompileConfig(context=8, target="cpu:reference")
model = load_source(sys.argv[1], config)
pipeline = default_pipeline(config)
print(digest(front_components(model.key, config, pipeline, config.target, model.shape_key)))
captured = capture(model, config, weights=False)
print(digest(graph_components(captured, config, pipeline, config.target)))
"""

SECOND_PROCESS = """
import sys
from pathlib import Path
import kimigraph.keys as keys
keys.compiler_hash = lambda: "a compiler"
import kimigraph.compiler as compiler
from kimigraph.ir.config import CompileConfig
def capture(*_):
    raise AssertionError("captured")
compiler.capture = capture
config = CompileConfig(context=8, target="cpu:reference", dump_passes=sys.argv[3])
report = compiler.compile_source(sys.argv[1], [config], Path(sys.argv[2]), print)[0]
print(report.cache["status"], report.cache["reason"], sep="|")
"""


@pytest.fixture
def same_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of one test agree on the compiler even while someone edits it."""
    monkeypatch.setattr("kimigraph.keys.compiler_hash", lambda: "a compiler")


def front_key(source: str, config: CompileConfig) -> str:
    model = load_source(source, config)
    target = "cpu:reference" if config.target == "auto" else config.target
    return digest(front_components(model.key, config, default_pipeline(config), target, model.shape_key))


@pytest.mark.usefixtures("same_compiler")
def test_a_second_process_hits_without_capturing(
    kimi: str, compiled: Any, tmp_path: Path, python: Callable[..., str]
) -> None:
    first = compiled(kimi, context=8, dump_passes=str(tmp_path / "dumps"))
    assert (first.cache["status"], first.cache["reason"]) == ("miss", "not compiled before")
    moved = tmp_path / "elsewhere" / "model"
    shutil.copytree(kimi, moved)
    said = python(
        SECOND_PROCESS, moved, tmp_path / "second", tmp_path / "replayed", cwd=tmp_path / "elsewhere",
        PYTHONHASHSEED="77", HOME=str(tmp_path),
    )  # fmt: skip
    assert said.splitlines()[-1] == "hit|the dumps are those of the original compilation"
    for name in ("program.py", "kernels/reference.py", "support/seeded.py"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    assert json.loads((tmp_path / "second" / "manifest.json").read_text())["info"]["source"] == "model"
    stored = sorted(path.name for path in (tmp_path / "dumps").iterdir())
    assert sorted(path.name for path in (tmp_path / "replayed").iterdir()) == stored
    assert "000-capture.py" in stored and "remarks.jsonl" in stored


@pytest.mark.usefixtures("same_compiler")
def test_keys_are_equal_across_processes_folders_and_times(
    kimi: str, tmp_path: Path, python: Callable[..., str]
) -> None:
    config = CompileConfig(context=8, target="cpu:reference")
    captured = capture(load_source(kimi, config), config)
    graph = digest(graph_components(captured, config, default_pipeline(config), config.target))
    moved = tmp_path / "copy"
    shutil.copytree(kimi, moved)
    os.utime(moved / "config.json", (1, 1))
    for seed in ("1", "2"):
        found = python(FRONT_KEY, moved, cwd=tmp_path, PYTHONHASHSEED=seed, HOME="/nonexistent", PORT="1234")
        assert found.split() == [front_key(kimi, config), graph]


@pytest.mark.parametrize("field", [f.name for f in fields(CompileConfig)])
def test_every_option_but_debug_ones_changes_the_front_key(kimi: str, field: str) -> None:
    base = CompileConfig(context=8)
    changed = front_key(kimi, replace(base, **{field: another(field)})) != front_key(kimi, base)
    debug = {f.name for f in fields(CompileConfig) if f.metadata.get("debug_only")}
    assert changed == (field not in debug)


def test_the_graph_key_leaves_out_only_what_graph_pipeline_or_target_say() -> None:
    names = {f.name for f in fields(CompileConfig)}
    assert set(SETTLED) < names
    kept = CompileConfig().key_fields().keys() - set(SETTLED)
    assert {"opt_level", "dtype", "seed", "required_fusions", "random_weights"} <= kept


@pytest.mark.parametrize(
    ("field", "value"), [("rms_norm_eps", 1e-3), ("index_topk", 4), ("vocab_size", 97), ("random_weights", {"seed": 6})]
)
def test_another_model_configuration_is_another_key(kimi: str, field: str, value: Any) -> None:
    config = CompileConfig(context=8)
    before = front_key(kimi, config)
    path = Path(kimi) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert front_key(kimi, config) != before


def test_the_compilers_own_files_are_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kimi: str) -> None:
    root, room = tmp_path / "package", tmp_path / "room"
    root.mkdir()
    room.mkdir()
    (root / "passes").symlink_to("../room")
    (room / "rewrite.py").write_text("a = 1")
    (root / "table.json").write_text("{}")
    seen = {digest(tree_hash(root))}
    for path, text in ((room / "rewrite.py", "a = 2"), (root / "table.json", "[]"), (room / "more.py", "")):
        path.write_text(text)
        seen.add(digest(tree_hash(root)))
    assert len(seen) == 4
    (room / "__pycache__").mkdir()
    (room / "__pycache__" / "rewrite.pyc").write_bytes(b"1")
    os.utime(room / "rewrite.py", (1, 1))
    assert digest(tree_hash(root)) in seen
    assert set(tree_hash(root)) == {"passes", "top"}
    base = front_key(kimi, CompileConfig(context=8))
    monkeypatch.setattr("kimigraph.keys.compiler_hash", lambda: "another compiler")
    assert front_key(kimi, CompileConfig(context=8)) != base


def test_an_edit_of_any_template_pass_or_builder_is_another_key(tmp_path: Path) -> None:
    package = Path(compiler.__file__).parent
    copy = tmp_path / "package"
    for room in ("passes", "codegen"):
        shutil.copytree(package / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    before = tree_hash(copy)
    files = sorted(copy.rglob("*.py"))
    assert len(files) > 80
    for path in files:
        text = path.read_bytes()
        path.write_bytes(text + b"\n")
        after = tree_hash(copy)
        room = path.relative_to(copy).parts[0]
        assert {name for name in before if before[name] != after[name]} == {room}, path
        path.write_bytes(text)
    assert tree_hash(copy) == before


@pytest.mark.parametrize("what", ["toy", "decode", "prefill"])
def test_what_is_compiled_again_is_equal_byte_by_byte(
    what: str, toy: str, kimi: str, compiled: Any, tmp_path: Path, cache_root: Path
) -> None:
    source, options = (toy, {}) if what == "toy" else (kimi, {"phase": what, "context": 8, "tokens": None})
    assert compiled(source, **options).cache["status"] == "miss"
    again = compiled(source, cache="check", **options)
    assert (again.cache["status"], again.cache["reason"]) == ("bypass", "--cache check: equal to the stored entry")
    (entry,) = Place(cache_root).entries()
    files = json.loads((entry / "entry.json").read_text())["body"]["files"]
    assert len(files) > 8


@pytest.mark.slow
def test_cubins_compiled_again_are_equal_byte_by_byte(
    kimi: str, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / f"triton{number}"))
        report = compiled(kimi, target="cuda:sm_90", context=64, cache="check" if number else "use")
    assert report.cache["reason"] == "--cache check: equal to the stored entry"


def test_a_compiler_that_is_not_deterministic_is_found_out(
    toy: str, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kimigraph.ir.errors import CorruptArtifactError

    compiled(toy)
    original = compiler.build_artifact

    def restless(program: Any, target: str, directory: Path, **options: Any) -> Any:
        manifest = original(program, target, directory, **options)
        with (directory / "program.py").open("a") as file:
            file.write("# 12:30\n")
        return manifest

    monkeypatch.setattr(compiler, "build_artifact", restless)
    with pytest.raises(CorruptArtifactError, match=r"other bytes in artifact/program\.py"):
        compiled(toy, cache="check")


def test_a_hit_says_what_it_saved(toy: str, compiled: Any) -> None:
    first = compiled(toy)
    assert first.cache["saved_seconds"] == 0
    second = compiled(toy)
    assert 0 < second.cache["saved_seconds"] < first.timing["total"]


def test_a_program_with_cubins_has_a_key_without_versions(kimi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CompileConfig(context=8, target="cuda:sm_90")
    keys: set[str] = set()
    for version in ("2.11.0", "2.13.0"):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr("kimigraph.keys.version", lambda name, value=version: value)
        monkeypatch.setattr("kimigraph.capture.identity.version", lambda name, value=version: value)
        keys.add(front_key(kimi, config))
        keys.add(front_key(kimi, replace(config, target="cpu")))
    assert len(keys) == 3  # one ahead of time, two for Triton


def test_the_rooms_that_are_links_are_in_the_compilers_hash() -> None:
    from kimigraph import keys

    files = set(keys._files(Path(compiler.__file__).parent))
    assert {"passes/canonicalize.py", "codegen/artifact.py", "runtime/executor.py", "ir/config.py"} <= files


def test_the_source_of_a_users_pass_is_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kimi: str) -> None:
    import importlib.util

    path = tmp_path / "own_pass.py"
    path.write_text("value = 1")
    spec = importlib.util.spec_from_file_location("own_pass", path)
    assert spec is not None
    monkeypatch.setitem(__import__("sys").modules, "own_pass", importlib.util.module_from_spec(spec))

    class Own(Pass):
        name, summary = "own", "does nothing"

        def apply(self, program: Any, context: Any) -> PassResult:
            return PassResult(False)

    Own.__module__ = "own_pass"
    config, pipeline = CompileConfig(context=8), Pipeline((Own(),))
    model = load_source(kimi, config)
    keys: list[str] = []
    for text in ("value = 1", "value = 2", "value = 1"):
        path.write_text(text)
        keys.append(digest(front_components(model.key, config, pipeline, "cpu:reference", model.shape_key)))
    assert keys[0] == keys[2] != keys[1]


def test_an_edited_source_file_is_a_miss(toy: str, compiled: Any, tmp_path: Path, monkeypatch: Any) -> None:
    assert compiled(toy).cache["status"] == "miss"
    assert compiled(toy).cache["status"] == "hit"
    text = (tmp_path / "toy_source.py").read_text()
    (tmp_path / "toy_source.py").write_text(text.replace("+ 1.0", "+ 2.0"))
    monkeypatch.delitem(__import__("sys").modules, "toy_source")
    __import__("importlib").invalidate_caches()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    assert compiled(toy).cache["status"] == "miss"
    assert "2.0" in (tmp_path / "out" / "program.py").read_text()


def test_equal_graphs_share_an_entry_and_others_do_not(toy: str, compiled: Any, cache_root: Path) -> None:
    """A comment changes the source, so the front key, and not the graph."""
    first = compiled(toy)
    path = Path("toy_source.py")
    path.write_text(path.read_text() + "# a comment\n")
    __import__("sys").modules.pop("toy_source")
    second = compiled(toy)
    assert (second.cache["status"], second.cache["key"]) == ("hit", first.cache["key"])
    assert "capture" in second.timing
    assert len(list(Place(cache_root).front_files())) == 2
    assert "capture" not in compiled(toy).timing


def test_results_of_another_structure_are_another_graph_key() -> None:
    from kimigraph.capture import capture_module

    class Pair(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return (x + 1, 3)

    class Named(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"y": x + 1}

    config = CompileConfig()
    keys: set[str] = set()
    for model in (Pair(), Named()):
        program = capture_module(model, (torch.ones(2),), {}, config)
        keys.add(digest(graph_components(program, config, Pipeline(), "cpu:reference")))
    assert len(keys) == 2


def test_modes(toy: str, compiled: Any, cache_root: Path) -> None:
    assert compiled(toy, cache="readonly").cache["status"] == "miss"
    assert not cache_root.exists()
    assert compiled(toy, cache="off").cache == {**compiled(toy, cache="off").cache, "status": "off"}
    assert not cache_root.exists()
    assert compiled(toy).cache["status"] == "miss"
    for mode, status in (("readonly", "hit"), ("use", "hit"), ("off", "off"), ("refresh", "bypass"), ("use", "hit")):
        assert compiled(toy, cache=mode).cache["status"] == status


def test_a_corrupt_entry_is_compiled_again_and_says_so(
    toy: str, compiled: Any, cache_root: Path, tmp_path: Path
) -> None:
    compiled(toy)
    (program,) = cache_root.rglob("program.py")
    program.write_text(program.read_text()[:-20])
    report = compiled(toy)
    assert report.cache["status"] == "miss"
    assert "corrupt entry set aside" in report.cache["reason"] and "program.py" in report.cache["reason"]
    assert (tmp_path / "out" / "program.py").read_text().endswith("main(HERE, DEVICE, step, load)\n")
    assert compiled(toy).cache["status"] == "hit"


def test_a_root_that_cannot_be_written_warns_once(
    toy: str, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path / "file" / "root"))
    report = compiled(toy)
    assert report.cache["status"] == "miss" and "cannot be written" in report.cache["reason"]
    assert len([text for text in compiled.said if "cannot be written" in text]) == 1
    assert (tmp_path / "out" / "program.py").is_file()


def test_times_of_the_passes_come_with_a_hit_when_asked_for(toy: str, compiled: Any) -> None:
    assert "per_pass" not in compiled(toy).timing
    timing = compiled(toy, time_passes=True).timing
    assert set(timing["per_pass"]) >= {"canonicalize", "raise-kda"}
    assert timing["total"] >= sum(value for name, value in timing.items() if name not in ("total", "per_pass"))


def test_other_peoples_dump_directory_is_refused_before_any_work(
    toy: str, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kimigraph.ir.errors import UsageError

    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    monkeypatch.setattr(compiler, "capture", None)
    with pytest.raises(UsageError, match=r"no dumps of kimigraph \(notes\.txt\)"):
        compiled(toy, dump_passes=str(tmp_path / "theirs"))
    assert (tmp_path / "theirs" / "notes.txt").read_text() == "mine"
