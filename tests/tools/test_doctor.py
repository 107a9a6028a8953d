"""``kimigraph doctor`` says what is true here, and what to do where something is missing."""

import json
import platform
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kimigraph.cli.app import make_app
from kimigraph.tools import doctor
from kimigraph.tools.doctor import Check, Diagnosis, diagnose


@pytest.fixture(scope="module")
def found() -> Diagnosis:
    return diagnose()


def check(diagnosis: Diagnosis, name: str) -> Check:
    [one] = [item for item in diagnosis.checks if item.name == name]
    return one


def test_versions_and_devices(found: Diagnosis) -> None:
    assert found.versions["python"] == platform.python_version()
    assert found.versions["torch"] == torch.__version__ and "triton" in found.versions
    assert found.devices[0]["kind"] == "cpu" and found.devices[0]["cores"] >= 1
    assert len(found.devices) == 1 + torch.cuda.device_count()


def test_targets_are_tried(found: Diagnosis) -> None:
    for name in ("cpu:reference", "cpu (interpreter)", "cuda:sm_90 (cross-compile)"):
        assert check(found, name).status == "works", check(found, name)
    assert check(found, "cuda").status == ("works" if torch.cuda.is_available() else "missing")
    assert found.healthy


def test_limits_of_the_interpreter_are_measured(found: Diagnosis) -> None:
    """The facts that the kernels work around; when one is no longer so, the workaround may go."""
    assert check(found, "fp32 products").status == check(found, "fp16 products").status == "works"
    for name, part in {
        "bf16 products": "is off by",
        "casts to bf16": "not rounded",
        "casts to fp8 (e4m3)": "not rounded",
        "sorts with NaN": "sorting [1, NaN, 3, 2]",
        "undefined lanes show": "hides",
    }.items():
        assert check(found, name).status == "limit" and part in check(found, name).detail


def test_a_missing_or_old_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.10.1+cpu", "triton": "3.7.1", "onnx": "1.18.0"}
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, ""))
    monkeypatch.setattr(doctor, "_probe", lambda kind, environment: "no answer")
    diagnosis = diagnose()
    assert check(diagnosis, "torch").status == "fails" and "older than 2.11" in check(diagnosis, "torch").detail
    assert check(diagnosis, "triton").status == check(diagnosis, "onnx").status == "works"
    assert check(diagnosis, "transformers").status == "missing"
    assert "kimigraph[hf]" in check(diagnosis, "transformers").detail
    assert check(diagnosis, "cpu (interpreter)") == Check("targets", "cpu (interpreter)", "fails", "no answer")
    assert not diagnosis.healthy


def test_the_command(monkeypatch: pytest.MonkeyPatch, found: Diagnosis) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda notify: found)
    plain = CliRunner().invoke(make_app(), ["doctor"])
    assert plain.exit_code == 0
    assert any(line.split() == ["fp32", "products", "works"] for line in plain.stdout.splitlines())
    document: dict[str, Any] = json.loads(CliRunner().invoke(make_app(), ["doctor", "--json"]).stdout)
    assert document["healthy"] is True and document["versions"] == found.versions
    broken = Diagnosis({}, [], [Check("targets", "cpu:reference", "fails", "no")])
    monkeypatch.setattr(doctor, "diagnose", lambda notify: broken)
    done = CliRunner().invoke(make_app(), ["doctor"])
    assert done.exit_code == 1 and "cpu:reference" in done.stderr
