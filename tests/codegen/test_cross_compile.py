"""Kernels ahead of time, on a machine without a GPU."""

import json

import pytest

from kimigraph.codegen import build_artifact
from kimigraph.codegen.architecture import ahead_of_time_arch
from kimigraph.codegen.cross_compile import compile_kernels
from kimigraph.codegen.kernel import KernelLaunch, KernelModule
from kimigraph.codegen.kernel_writer import KernelFile, KernelSet
from kimigraph.ir.errors import CompileError, UsageError
from kimigraph.ir.manifest import verify_artifact


def test_cubins_and_their_metadata(programs, artifact_directory, monkeypatch):
    """Also from a process that would interpret kernels: the workers do not inherit the variable."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    told: list[str] = []
    manifest = build_artifact(programs["kda_decode"](), "cuda:sm_90", artifact_directory, notify=told.append)
    assert any("sm_90" in line for line in told)
    assert verify_artifact(artifact_directory) == manifest
    (record,) = manifest.kernels
    assert record.cubins
    for cubin in record.cubins:
        assert (artifact_directory / cubin.file).read_bytes()[:4] == b"\x7fELF"
        metadata = json.loads((artifact_directory / cubin.metadata).read_text())
        assert metadata["entry"] == cubin.function
        assert metadata["arch"] == 90
        assert 0 < metadata["registers"] <= 255
        assert next(iter(metadata["arguments"].values())).startswith("*")
    assert manifest.checksums
    assert manifest.reference == "cpu:reference"


def test_an_architecture_that_triton_cannot_build(programs, artifact_directory):
    with pytest.raises(UsageError, match=r"cuda:sm_30.*builds .*sm_90"):
        build_artifact(programs["linear"](), "cuda:sm_30", artifact_directory, self_test=False)


@pytest.mark.parametrize("target", ["cuda:sm_", "cuda:90", "gpu", "cuda:sm_90x", ""])
def test_an_unknown_target_lists_the_known_ones(target):
    with pytest.raises(UsageError, match="cpu:reference"):
        ahead_of_time_arch(target)


def test_a_kernel_that_does_not_compile_is_named(artifact_directory):
    text = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef broken(x):\n    tl.store(x, missing)\n"
    module = KernelModule(text, (KernelLaunch("broken", {"x": "*fp32"}, {}, divisible=("x",)),))
    (artifact_directory / "kernels").mkdir()
    (artifact_directory / "kernels" / "broken_0.py").write_text(text)
    kernels = KernelSet("cuda:sm_90", [], [KernelFile("broken_0", module)], {})
    with pytest.raises(CompileError, match=r"broken_0\.py, broken: .*missing"):
        compile_kernels(kernels, artifact_directory, 90, lambda _: None)
