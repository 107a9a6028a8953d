"""``mxfp8_quantize`` in programs: the references run it, other targets say that it has no kernel."""

import operator

import pytest
import torch

from kimigraph.codegen import build_artifact
from kimigraph.ir.errors import CompileError
from kimigraph.runtime.executor import Executor


def quantizing(toolbox):
    def build(graph, x):
        pair = toolbox.call(graph, "mxfp8_quantize", x, group=32, rounding="rceil")
        return [graph.call_function(operator.getitem, (pair, index)) for index in (0, 1)]

    return toolbox.make_program([toolbox.spec("x", (3, 72))], build)


def test_references_run_it(toolbox, artifact_directory):
    build_artifact(quantizing(toolbox), "cpu:reference", artifact_directory)
    x = torch.randn(3, 72)
    codes, scales = Executor(artifact_directory, {}, "cpu")(x)
    want = torch.ops.kimigraph.mxfp8_quantize(x)
    assert torch.equal(codes, want[0]) and torch.equal(scales, want[1]) and scales.shape == (3, 3)


@pytest.mark.parametrize("target", ["cpu", "cuda", "cuda:sm_90"])
def test_targets_with_kernels_name_the_way_out(toolbox, target, artifact_directory):
    with pytest.raises(CompileError, match=r"mxfp8_quantize has no kernel yet.*--target cpu:reference"):
        build_artifact(quantizing(toolbox), target, artifact_directory, self_test=False)
    assert list(artifact_directory.iterdir()) == []
