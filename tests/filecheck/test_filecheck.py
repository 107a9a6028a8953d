"""Golden programs: what each pass makes of a small graph, line by line, and what it leaves alone.

Every ``<pass>/*.py`` here is a printed program whose first line says how to run it. After a change that is meant,
``python scripts/update_filechecks.py`` writes the CHECK lines anew.
"""

import importlib.util
import io
from contextlib import redirect_stderr
from pathlib import Path
from types import ModuleType

import pytest
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import parse_argv_options
from filecheck.parser import Parser

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.data_sets import data_sets
from kimigraph.ir.printer import print_program
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.registry import BUILT_IN, registered_passes
from kimigraph.tools.numerics import Reference
from kimigraph.tools.opt import main, optimize_script, read_script

FOLDER = Path(__file__).resolve().parent
GOLDEN = sorted(FOLDER.glob("*/*.py"))
IDS = [path.relative_to(FOLDER).as_posix() for path in GOLDEN]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def script() -> ModuleType:
    return load(FOLDER.parents[1] / "scripts" / "update_filechecks.py")


def filecheck(arguments: list[str], printed: str) -> str:
    """What ``filecheck`` has to say about a printed program; empty when it matches."""
    options = parse_argv_options(["filecheck", *arguments])
    said = io.StringIO()
    with redirect_stderr(said):
        status = Matcher(options, FInput("<stdin>", printed), Parser.from_opts(options)).run()
    return said.getvalue() or f"exit status {status}" if status else ""


@pytest.mark.parametrize("path", GOLDEN, ids=IDS)
def test_the_pass_makes_what_is_written_here(path: Path, script: ModuleType) -> None:
    said = filecheck(script.run_line(path)[1], script.output(path))
    if said:
        pytest.fail(f"{said}\nrun it:    {script.command(path)}\naccept it: python scripts/update_filechecks.py")


@pytest.mark.parametrize("path", GOLDEN, ids=IDS)
def test_what_it_makes_computes_the_same(path: Path, script: ModuleType) -> None:
    program = read_script(path)
    reference = Reference(program, data_sets())
    before = print_program(program)
    pipeline = Pipeline.parse(script.run_line(path)[0][2])
    [record] = run_pipeline(program, pipeline, PassContext(CompileConfig()))
    comparison = reference.compare(program)
    assert comparison.passed, comparison.fault
    changed = not path.stem.startswith("refused") and not pipeline.passes[0].analysis
    assert record.result.modified is changed
    assert (print_program(program) != before) is changed
    assert pipeline.names == [path.parent.name]


def test_every_built_in_pass_has_a_hit_and_a_refusal() -> None:
    known = registered_passes()
    for name in BUILT_IN:
        # Without a policy, a layout, drafts, logs, ranks or half-batches they do nothing: tests/passes has them.
        if name in (
            "insert-quantization",
            "page-caches",
            "interleave-halves",
            "log-states",
            "defer-states",
            "shard",
            "share-indexer-rows",
            "share-tokens",
            "prune-index-exchange",
            "balance-indexer",
            "fuse-collectives",
            "split-stages",
            "overlap-communication",
        ):
            continue
        stems = [path.stem for path in GOLDEN if path.parent.name == name]
        assert [stem for stem in stems if not stem.startswith("refused")], name
        # What an analysis refuses is an error; tests/passes/scheduling has them.
        assert known[name].analysis or [stem for stem in stems if stem.startswith("refused")], name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kda_decode.default(qkv, conv_weight", "kda_decode.default(conv_weight, qkv"),
        ("    return (kda_decode,)", "    sin = torch.ops.aten.sin.default(kda_decode)\n    return (kda_decode,)"),
        ("state_layout='kv'", "state_layout='vk'"),
        ("; replaces 7 nodes", "; replaces 8 nodes"),
        ("    return (kda_decode,)", "    return (kda_decode, state)"),
    ],
)
def test_another_program_does_not_match(old: str, new: str, script: ModuleType) -> None:
    path = FOLDER / "raise-kda" / "key_value.py"
    printed = script.output(path)
    assert old in printed
    assert "error" in filecheck(script.run_line(path)[1], printed.replace(old, new))


def test_the_script_writes_what_stands_here_and_mends_what_does_not(script: ModuleType) -> None:
    path = FOLDER / "fuse-sparse-attention" / "rope.py"
    text, printed = path.read_text(encoding="utf-8"), script.output(path)
    assert script.with_checks(text, printed) == text
    assert script.with_checks(text.partition("# CHECK")[0], printed) == text
    spoiled = text.replace("scale=0.3", "scale=0.4").replace("# CHECK-NEXT:     getitem = sparse_attention[0]", "#")
    assert spoiled != text and script.with_checks(spoiled, printed) == text


def test_two_brackets_in_a_row_match_themselves_alone(tmp_path: Path, script: ModuleType) -> None:
    printed = "\n@torch.no_grad()\ndef step():\n    x = f([[1], [2]], {{3}})\n    return (x,)\n"
    path = tmp_path / "case.py"
    path.write_text(script.with_checks("# text\n", printed))
    assert filecheck(["--match-full-lines", str(path)], printed) == ""
    assert filecheck(["--match-full-lines", str(path)], printed.replace("[[1]", "[[0]")) != ""


def test_wrong_usage_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ([str(tmp_path / "nowhere.py")], "is no file"),
        ([str(GOLDEN[0]), "--passes", "canonicalise"], "did you mean 'canonicalize'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2 and message in capsys.readouterr().err
    (tmp_path / "other.py").write_text("x = 1\n")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "other.py")])
    assert "it has no step, INPUTS, OUTPUTS, CONSTANTS" in capsys.readouterr().err


def test_without_passes_it_prints_what_it_read() -> None:
    path = FOLDER / "canonicalize" / "dead_code.py"
    printed = optimize_script(path, "")
    for line in (
        path.read_text(encoding="utf-8").partition("    unused = ")[2].partition("\n    return")[0].splitlines()
    ):
        assert line.partition(" = ")[2] in printed
