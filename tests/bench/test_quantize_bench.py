"""``kimigraph bench quantize`` on the CPU: what torch.compile is given computes the same bytes; its refusals."""

import pytest
import torch
from typer.testing import CliRunner

from kimigraph.bench import quantize
from kimigraph.cli.app import make_app
from kimigraph.ir.operators import OPERATORS


@pytest.mark.parametrize("subject", quantize.SUBJECTS, ids=lambda subject: subject.name)
def test_the_peers_function_gives_the_references_bytes(subject):
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    function = quantize._mxfp8 if subject.op == "mxfp8_quantize" else quantize._fp8
    found = function(x, subject.group, subject.attributes.get("scales") == "power2")
    wanted = OPERATORS[subject.op].reference(x, **subject.attributes)
    for part, want in zip(found, wanted, strict=True):
        assert torch.equal(part.view(torch.uint8), want.view(torch.uint8))


def test_bytes_moved():
    first = quantize.SUBJECTS[0]
    assert first.moved(2) == 2 * (7168 * 3 + 224)


def test_without_a_gpu_or_with_another_peer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(make_app(), ["bench", "quantize"])
    assert result.exit_code == 2 and "needs an NVIDIA GPU" in result.stderr
    result = CliRunner().invoke(make_app(), ["bench", "quantize", "--only", "fla"])
    assert result.exit_code == 2 and "choose torch_compile, vllm" in result.stderr
