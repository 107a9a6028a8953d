"""The example model as two interleaved half-batches: compiled, proven, and equal to the eager model."""

from pathlib import Path

import pytest

from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")


@pytest.mark.slow
def test_half_batches_on_several_streams_pass_verification(tmp_path: Path) -> None:
    config = CompileConfig(
        target="cpu:reference",
        batch=2,
        context=64,
        overrides=(("num_hidden_layers", "4"),),
        half_batches="on",
        force_streams=True,
        verify=True,
        cache="off",
        report=False,
    )
    [report] = compile_source(EXAMPLE, [config], tmp_path / "artifact", print)
    assert report.verify is not None and report.verify["passed"]
    assert report.shape_key == "decode-b2-t1-c64"
    assert report.streams is not None and report.streams["count"] >= 2
    kda = [kernel["replaces"] for kernel in report.kernels if kernel["op"] == "kda_decode"]
    assert len(kda) == 6  # three layers, twice
    assert any("two half-batches of 1 sequences" in remark["message"] for remark in report.remarks)
