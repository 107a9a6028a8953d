"""program.py on a GPU: the kernels against the references' checksums, again without kimigraph."""

import pytest

from kimigraph.codegen import build_artifact

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("target", ["cuda", "cuda:sm_90"])
@pytest.mark.parametrize("name", ["lightning_indexer", "sparse_attention", "kda_decode", "linear"])
def test_kernels_print_the_checksums_of_the_references(name, target, programs, artifact_directory, run_script):
    manifest = build_artifact(programs[name](), target, artifact_directory)
    assert manifest.checksums
    result = run_script(artifact_directory, "--check")
    assert result.returncode == 0, result.stderr
