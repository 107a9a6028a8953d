"""``kimigraph compile``: from options to configurations, from reports to text, from failures to exit codes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import (
    CaptureError,
    CompileError,
    CorruptArtifactError,
    NumericsError,
    RequiredFusionError,
    UsageError,
)
from kimigraph.ir.report import CompileReport

VERIFY = {"max_abs_err": 1e-5, "max_rel_err": 2e-5, "tolerance": 1e-4, "passed": True, "reference": "eager"}


def test_no_option_asks_for_the_default_configuration(cli: Any, compiler: Any) -> None:
    assert cli("compile", "model").exit_code == 0
    assert compiler.configs == [CompileConfig()]
    assert compiler.calls == [("model", None)]


def test_every_option_reaches_its_field(cli: Any, compiler: Any) -> None:
    arguments = (
        "--phase prefill --batch 2 --tokens 8 --context 256 --target cuda:sm_90 --dtype bfloat16 -O1 "
        "--passes canonicalize --disable-pass raise-kda --disable-pass x --require-fusion fuse-sparse-attention "
        "--stop-after canonicalize "
        "--no-marks --random-weights --seed 3 --set num_hidden_layers=4 --set name=a=b --out artifact "
        "--dump-passes dumps --verify --time-passes --cache readonly --json"
    )
    assert cli("compile", "model", *arguments.split()).exit_code == 0
    assert compiler.calls == [("model", Path("artifact"))]
    assert compiler.configs == [
        CompileConfig(
            target="cuda:sm_90",
            opt_level=1,
            phase="prefill",
            batch=2,
            tokens=8,
            context=256,
            dtype="bfloat16",
            seed=3,
            passes="canonicalize",
            disabled_passes=("raise-kda", "x"),
            required_fusions=("fuse-sparse-attention",),
            stop_after="canonicalize",
            marks=False,
            random_weights=True,
            overrides=(("num_hidden_layers", "4"), ("name", "a=b")),
            cache="readonly",
            verify=True,
            time_passes=True,
            dump_passes="dumps",
        )
    ]


@pytest.mark.parametrize("level", [["-O", "3"], ["-O3"]])
def test_a_level_may_be_joined_to_its_letter(cli: Any, compiler: Any, level: list[str]) -> None:
    assert cli("compile", "model", *level).exit_code == 0
    assert compiler.configs[0].opt_level == 3


def test_repeated_sizes_give_every_combination_once_and_a_list_of_documents(cli: Any, compiler: Any) -> None:
    sizes = ("--jobs", "1", "--batch", "1", "--batch", "2", "--context", "64", "--context", "128", "--batch", "1")
    done = cli("compile", "model", *sizes, "--json")
    assert [(c.batch, c.tokens, c.context) for c in compiler.configs] == [
        (1, None, 64),
        (1, None, 128),
        (2, None, 64),
        (2, None, 128),
    ]
    assert [document["shape_key"] for document in json.loads(done.stdout)] == ["b1", "b1", "b2", "b2"]


def test_one_shape_gives_one_document_with_all_keys(cli: Any, compiler: Any) -> None:
    document = json.loads(cli("compile", "model", "--json").stdout)
    promised = (
        "source phase target shape_key graph fusions kernels launches streams memory quantization cache timing verify "
        "artifact dumps report"
    )
    assert set(promised.split()) <= set(document)


def test_numbers_that_json_does_not_have_are_null(cli: Any, compiler: Any) -> None:
    verify = {**VERIFY, "max_abs_err": math.nan, "max_rel_err": math.inf, "passed": False}
    compiler.reports = [CompileReport(shape_key="b1", verify=verify)]
    done = cli("compile", "model", "--json")
    document = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["verify"]["max_abs_err"] is None and document["verify"]["max_rel_err"] is None
    assert done.exit_code == 3


def test_what_libraries_print_does_not_reach_stdout(cli: Any, compiler: Any) -> None:
    compiler.noise = "a library says hello"
    done = cli("compile", "model", "--json")
    json.loads(done.stdout)
    assert "a library says hello" in done.stderr


def test_progress_stays_silent_without_a_terminal(cli: Any, compiler: Any) -> None:
    assert cli("compile", "model").stderr == ""


def test_the_summary_says_what_happened_in_plain_text(cli: Any, compiler: Any) -> None:
    compiler.reports = [
        CompileReport(
            source="k31_tiny",
            target="cpu",
            shape_key="decode-b2-t1-c256",
            graph={"nodes_before": 400, "nodes_after": 200},
            launches={"before": 190, "after": 90},
            fusions=[
                {"rule": "raise-kda", "via": "pattern", "count": 3, "nodes": ["a", "b", "c"], "reason": ""},
                {
                    "rule": "fuse-sparse-attention",
                    "via": "pattern",
                    "count": 0,
                    "nodes": [],
                    "reason": "the mask has [x] two users",
                },
            ],
            kernels=[
                {"name": name, "op": "kda_decode", "file": "kernels/kda_decode_0.py", "bytes": 1536000, "flops": 12}
                for name in ("kda_1", "kda_2")
            ],
            cache={"status": "miss", "key": "ab", "reason": "first time"},
            timing={"capture": 1.5, "total": 2.25, "passes": {"canonicalize": 0.25}},
            verify=VERIFY,
            artifact="a-long-path/" * 20 + "artifact",
        )
    ]
    done = cli("compile", "model")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "k31_tiny: decode-b2-t1-c256 for cpu"
    assert "raise-kda 3x via pattern" in lines
    assert "fuse-sparse-attention 0x the mask has [x] two users" in lines
    assert "kernels/kda_decode_0.py kda_decode 2x 1.54 MB 12 FLOP" in lines
    assert "graph 400 nodes before the passes, 200 after" in lines
    assert "cache miss (first time)" in lines
    assert "verify passed against eager: largest error 1e-05, relative 2e-05, tolerance 0.0001" in lines
    assert f"artifact {'a-long-path/' * 20}artifact" in lines
    assert "pass canonicalize 0.25" in lines
    assert "\x1b" not in done.stdout
    assert not [line for line in done.stdout.splitlines() if line != line.rstrip()]


def test_the_stages_are_timed_with_and_without_the_passes_apart(cli: Any, compiler: Any) -> None:
    compiler.reports = [CompileReport(timing={"passes": 0.5, "total": 2.0})]
    lines = [line.split() for line in cli("compile", "model").stdout.splitlines()]
    assert ["passes", "0.50"] in lines and ["total", "2.00"] in lines


def test_a_failed_verification_is_reported_and_exits_with_3(cli: Any, compiler: Any) -> None:
    compiler.reports = [CompileReport(shape_key="b7", verify={**VERIFY, "passed": False})]
    done = cli("compile", "model")
    assert done.exit_code == 3
    assert "FAILED" in done.stdout and "b7" in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CaptureError("control flow on values\n  at model.py:3"), 1),
        (CompileError("no kernel"), 1),
        (UsageError("no such directory"), 2),
        (NumericsError("too far"), 3),
        (RequiredFusionError("fuse-sparse-attention did not fire"), 4),
        (CorruptArtifactError("kernels/x.py is not what the manifest says"), 5),
    ],
)
def test_an_error_is_one_paragraph_on_stderr_and_its_code(cli: Any, compiler: Any, error: Exception, code: int) -> None:
    compiler.error = error
    done = cli("compile", "model")
    assert done.exit_code == code
    assert done.stdout == ""
    assert done.stderr == f"error: {' '.join(str(error).split())}\n"


def test_a_missing_optional_package_is_named_with_its_extra(cli: Any, compiler: Any) -> None:
    compiler.error = ModuleNotFoundError("No module named 'transformers.models'", name="transformers.models")
    done = cli("compile", "model")
    assert done.exit_code == 1 and "pip install 'kimigraph[hf]'" in done.stderr


def test_an_interruption_exits_with_130(cli: Any, compiler: Any) -> None:
    compiler.error = KeyboardInterrupt()
    done = cli("compile", "model")
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")


def test_an_error_that_no_one_foresaw_has_no_traceback_unless_asked_for(
    cli: Any, compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler.error = ZeroDivisionError("division by zero")
    done = cli("compile", "model")
    assert done.exit_code == 1
    assert "ZeroDivisionError at shapes.py:" in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    monkeypatch.setenv("KIMIGRAPH_TRACEBACK", "1")
    assert "Traceback" in cli("compile", "model").stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "source"),
        (["model", "--batch", "0"], "batch"),
        (["model", "--context", "many"], "context"),
        (["model", "-O4"], "-O"),
        (["model", "--phase", "both"], "phase"),
        (["model", "--cache", "maybe"], "cache"),
        (["model", "--set", "layers"], "FIELD=VALUE"),
        (["model", "--set", "=4"], "FIELD=VALUE"),
        (["model", "--batch", "1", "--batch", "2", "--dump-passes", "d"], "one shape"),
        (["model", "--no-such-option"], "no-such-option"),
    ],
)
def test_a_request_that_cannot_be_read_exits_with_2(cli: Any, compiler: Any, arguments: list[str], says: str) -> None:
    done = cli("compile", *arguments)
    assert done.exit_code == 2
    assert says.lower() in done.stderr.lower()
    assert done.stdout == "" and compiler.calls == []
