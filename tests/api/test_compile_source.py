"""``compile_source``: where artifacts land, what stays whole, and how bad requests end."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kimigraph.compiler as compiler
import kimigraph.verify as verification
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CaptureError, KimigraphError, NumericsError, RequiredFusionError, UsageError
from kimigraph.outputs import staged_directory
from kimigraph.run import run_artifact
from kimigraph.session import resolve_target


def listing(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def leftovers(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def test_the_default_directory_is_named_after_source_and_shape(toy: str, tmp_path: Path, kimi: str) -> None:
    (report,) = compile_source(toy, [CompileConfig(target="cpu:reference")], None, print)
    assert report.artifact == f"build-{report.shape_key}"
    assert (tmp_path / report.artifact / "program.py").is_file()
    assert run_artifact(Path(report.artifact), None, None, 1)["passed"] is True


def test_each_of_several_shapes_has_its_directory(kimi: str, tmp_path: Path) -> None:
    configs = [
        CompileConfig(target="cpu:reference", context=context, passes="canonicalize", batch=1) for context in (8, 12)
    ]
    reports = compile_source(kimi, configs, tmp_path / "out", print)
    assert [report.artifact for report in reports] == [
        str(tmp_path / "out" / f"decode-b1-t1-c{context}") for context in (8, 12)
    ]
    for report in reports:
        assert json.loads((Path(str(report.artifact)) / "manifest.json").read_text())["shape_key"] == report.shape_key


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "a note": lambda path: (path / "notes.txt").write_text("mine"),
    "a note in a folder": lambda path: ((path / "sub").mkdir(), (path / "sub" / "notes.txt").write_text("mine")),
    "a manifest of something else": lambda path: (path / "manifest.json").write_text('{"name": "web page"}'),
    "an unreadable manifest": lambda path: (path / "manifest.json").write_text("{"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_directory_with_other_files_is_refused_untouched(toy: str, compiled: Any, tmp_path: Path, what: str) -> None:
    out = tmp_path / "theirs"
    out.mkdir()
    FOREIGN[what](out)
    before = listing(out)
    with pytest.raises(UsageError, match=r"holds files that are no part of an artifact.*another --out"):
        compiled(toy, out)
    assert listing(out) == before


def test_an_artifact_with_a_note_in_it_is_refused(toy: str, compiled: Any, tmp_path: Path) -> None:
    compiled(toy)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        compiled(toy)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_file_is_refused(toy: str, compiled: Any, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        compiled(toy)


def test_an_artifact_is_replaced_through_a_link(toy: str, compiled: Any, tmp_path: Path) -> None:
    compiled(toy, tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    compiled(toy, tmp_path / "link", passes="")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "program.py").is_file()


@pytest.mark.parametrize(
    ("stage", "error"),
    [("capture", CaptureError), ("run_pipeline", MemoryError), ("build_artifact", KeyboardInterrupt)],
)
def test_the_old_artifact_stays_whole_when_the_new_compilation_ends_early(
    toy: str, compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, error: type[BaseException]
) -> None:
    compiled(toy)
    before = listing(tmp_path / "out")
    original = getattr(compiler, stage)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise error("now")

    monkeypatch.setattr(compiler, stage, interrupted)
    with pytest.raises(error):
        compiled(toy, cache="off")
    assert listing(tmp_path / "out") == before
    assert leftovers(tmp_path) == []
    fresh = tmp_path / "never"
    with pytest.raises(error):
        compiled(toy, fresh, cache="off")
    assert not fresh.exists()


def test_an_interruption_between_the_two_renames_brings_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "out"
    final.mkdir()
    original = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.suffix == ".kimigraph":
            raise KeyboardInterrupt
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    inode = final.stat().st_ino
    with pytest.raises(KeyboardInterrupt), staged_directory(final) as staged:
        (staged / "new").write_text("new")
    assert final.stat().st_ino == inode
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _weightless(tmp_path: Path) -> str:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "kimi_k31"}')
    return str(tmp_path / "bare")


def _unknown_type(tmp_path: Path) -> str:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "llama"}')
    return str(tmp_path / "odd")


def _function(tmp_path: Path, body: str) -> str:
    (tmp_path / "bad_source.py").write_text(
        "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n"
        f"        {body}\ndef build():\n    return M(), (torch.ones(2),)\n"
    )
    return "bad_source:build"


BAD: dict[str, tuple[Callable[[Path], str], dict[str, Any], type[KimigraphError], str]] = {
    "missing path": (lambda p: str(p / "nowhere"), {}, UsageError, "nowhere does not exist"),
    "no config.json": (lambda p: str(p), {}, UsageError, "has no config.json"),
    "no weights": (_weightless, {}, UsageError, r"no \*.safetensors files.*--random-weights"),
    "unknown model type": (
        _unknown_type,
        {},
        UsageError,
        "'llama' is not known; known are kimi_k3, kimi_k31, kimi_linear, deepseek_v32",
    ),
    "control flow": (
        lambda p: _function(p, "return x if x.sum() > 0 else -x"),
        {},
        CaptureError,
        r"bad_source\.py:4 decides by the value of a tensor",
    ),
    "batch 0": (lambda p: str(p / "kimi"), {"batch": 0}, UsageError, "--batch 0 is not a shape"),
    "tokens beyond context": (lambda p: str(p / "kimi"), {"tokens": 9, "context": 8}, UsageError, "--tokens 9"),
    "unknown target": (lambda p: str(p / "kimi"), {"target": "tpu"}, UsageError, "unknown target 'tpu'"),
    "unknown pass": (lambda p: str(p / "kimi"), {"passes": "canonicalise"}, UsageError, "canonicalize"),
    "unknown disabled pass": (lambda p: str(p / "kimi"), {"disabled_passes": ("x",)}, UsageError, "--disable-pass"),
    "no fusion": (lambda p: str(p / "kimi"), {"required_fusions": ("canonicalize",)}, UsageError, "is no fusion"),
    "stop after nothing": (
        lambda p: str(p / "kimi"),
        {"stop_after": "raise-kda", "passes": "canonicalize"},
        UsageError,
        "--stop-after raise-kda",
    ),
    "unknown cache mode": (lambda p: str(p / "kimi"), {"cache": "always"}, UsageError, "--cache always.*readonly"),
    "unknown level": (lambda p: str(p / "kimi"), {"opt_level": 7}, UsageError, "optimization level 7"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_request_is_one_paragraph_and_leaves_nothing(
    compiled: Any, kimi: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    make, fields, error, message = BAD[what]
    monkeypatch.chdir(tmp_path)
    source = make(tmp_path)
    with pytest.raises(error, match=message) as raised:
        compiled(source, context=fields.pop("context", 8) if source.endswith("kimi") else None, **fields)
    assert type(raised.value) is error
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000
    assert not (tmp_path / "out").exists()
    assert leftovers(tmp_path) == []


def test_k_beyond_the_context_picks_all(kimi: str, compiled: Any, tmp_path: Path) -> None:
    report = compiled(kimi, context=6, verify=True)
    assert report.verify["passed"]
    notes = json.loads((tmp_path / "out" / "manifest.json").read_text())["info"]["notes"]
    assert any("index_topk 8 is larger than the context 6" in note for note in notes)


def test_a_required_fusion_that_does_not_fire_says_why_and_is_not_kept(
    toy: str, compiled: Any, tmp_path: Path, cache_root: Path
) -> None:
    for _ in range(2):
        with pytest.raises(RequiredFusionError, match="fuse-sparse-attention: ") as raised:
            compiled(toy, required_fusions=("fuse-sparse-attention",))
        assert raised.value.exit_code == 4
    assert not list(cache_root.rglob("report.json"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(RequiredFusionError, match="--disable-pass fuse-sparse-attention turns it off"):
        compiled(toy, required_fusions=("fuse-sparse-attention",), disabled_passes=("fuse-sparse-attention",))


FUSING = [
    "raise-kda",
    "raise-attention-residual",
    "raise-cache-writes",
    "raise-norms",
    "raise-moe",
    "fuse-lightning-indexer",
    "fuse-sparse-attention",
    "fuse-indexer-attention",
]
ALL = [*FUSING, "merge-horizontal", "fuse-pointwise"]


@pytest.mark.parametrize(
    ("fields", "rules"),
    [
        ({}, ALL),
        ({"opt_level": 1}, FUSING),
        ({"stop_after": "fuse-lightning-indexer"}, FUSING[: FUSING.index("fuse-lightning-indexer") + 1]),
        ({"disabled_passes": ("raise-kda",)}, ALL[1:]),
        ({"passes": "canonicalize,raise-kda"}, ["raise-kda"]),
        ({"opt_level": 0}, []),
    ],
)
def test_the_pipeline_is_what_was_asked_for(toy: str, compiled: Any, fields: dict[str, Any], rules: list[str]) -> None:
    assert [entry["rule"] for entry in compiled(toy, **fields).fusions] == rules


def test_verification_passes_for_the_toy(toy: str, compiled: Any) -> None:
    for level in (0, 2):
        report = compiled(toy, verify=True, opt_level=level)
        assert report.verify["passed"] and report.verify["reference"] == "eager"
        assert report.verify["max_rel_err"] <= report.verify["tolerance"] == 1e-4


def test_a_wrong_program_fails_verification_and_is_neither_written_nor_kept(
    toy: str, compiled: Any, tmp_path: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(toy, passes="")
    before = listing(tmp_path / "out")
    original = compiler.build_artifact

    def sabotaged(program: Any, target: str, directory: Path, **options: Any) -> Any:
        for node in program.graph_module.graph.nodes:
            if node.target == torch.ops.aten.add.Tensor:
                node.args = (node.args[0], 1.01)
        return original(program, target, directory, **options)

    monkeypatch.setattr(compiler, "build_artifact", sabotaged)
    with pytest.raises(NumericsError, match="program against captured graph: output differs by") as raised:
        compiled(toy, verify=True, opt_level=1)
    assert raised.value.exit_code == 3
    assert listing(tmp_path / "out") == before
    monkeypatch.setattr(compiler, "build_artifact", original)
    report = compiled(toy, verify=True, opt_level=1)
    assert (report.cache["status"], report.verify["passed"]) == ("miss", True)


def test_an_entry_of_the_cache_that_fails_verification_is_discarded(
    toy: str, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled(toy).cache["status"] == "miss"
    original = verification.run_artifact

    def wrong(*args: Any) -> Any:
        values = original(*args)
        return verification.StepValues({name: value + 1 for name, value in values.values.items()})

    monkeypatch.setattr(verification, "run_artifact", wrong)
    with pytest.raises(NumericsError):
        compiled(toy, verify=True)
    monkeypatch.setattr(verification, "run_artifact", original)
    assert compiled(toy, verify=True).cache["status"] == "miss"


def test_a_target_that_cannot_run_here_cannot_be_verified_here(
    toy: str, compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="runs on a CUDA device"):
        compiled(toy, target="cuda:sm_90", verify=True)


def test_auto_is_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, target in ((True, "cuda"), (False, "cpu:reference")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert resolve_target("auto") == target


def test_run_binds_real_weights_and_given_inputs(toy: str, compiled: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    compiled(toy)
    weights, inputs = tmp_path / "weights", tmp_path / "inputs.safetensors"
    weights.mkdir()
    save_file({"weight": torch.eye(4)}, weights / "model.safetensors")
    save_file({"x": torch.eye(4)[:3].contiguous(), "cache.0.sum": torch.zeros(4)}, inputs)
    result = run_artifact(tmp_path / "out", weights, inputs, 2)
    assert result["passed"] is None and len(result["seconds"]) == 2
    ((total, *_),) = [sums for name, sums in result["outputs"].items() if name != "cache.0.sum"]
    assert total == 9.0  # three rows with top values 1 and 0, plus 1.0 each
    assert result["outputs"]["cache.0.sum"][0] == 3.0
    for tensors, message in (
        ({"z": torch.ones(1)}, "does not take: z; it takes x, cache.0.sum"),
        ({"x": torch.ones(2, 4)}, r"x is torch.float32 \(2, 4\)"),
    ):
        save_file(tensors, inputs)
        with pytest.raises(UsageError, match=message):
            run_artifact(tmp_path / "out", None, inputs, 1)
    inputs.write_bytes(b"no such file")
    with pytest.raises(UsageError, match="no readable safetensors file"):
        run_artifact(tmp_path / "out", None, inputs, 1)
    shutil.rmtree(weights)
    with pytest.raises(UsageError, match="has no"):
        run_artifact(tmp_path / "out", weights, None, 1)
