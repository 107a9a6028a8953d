"""The quantisers in programs: references on the CPU, kernels elsewhere."""

import operator

import pytest
import torch

from kimigraph.codegen import build_artifact
from kimigraph.runtime.executor import Executor

OPTIONS = {"mxfp8_quantize": {"group": 32, "rounding": "rceil"}, "fp8_quantize": {"tile": 24, "scales": "amax"}}


def quantizing(toolbox, name):
    def build(graph, x):
        pair = toolbox.call(graph, name, x, **OPTIONS[name])
        return [graph.call_function(operator.getitem, (pair, index)) for index in (0, 1)]

    return toolbox.make_program([toolbox.spec("x", (3, 72))], build)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_references_run_it(toolbox, artifact_directory, name):
    build_artifact(quantizing(toolbox, name), "cpu:reference", artifact_directory)
    x = torch.randn(3, 72)
    values, scales = Executor(artifact_directory, {}, "cpu")(x)
    want = getattr(torch.ops.kimigraph, name)(x, **OPTIONS[name])
    assert torch.equal(values.view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(scales, want[1]) and scales.shape == (3, 3)


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_other_targets_have_one_launch(toolbox, target, artifact_directory, name):
    manifest = build_artifact(quantizing(toolbox, name), target, artifact_directory)
    assert manifest.launches == 1 and [kernel.op for kernel in manifest.kernels] == [name]
