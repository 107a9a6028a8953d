"""Models that keep their state in buffers: the program updates them where the model would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kimigraph
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import NumericsError


class Counter(nn.Module):
    """A running sum and the number of calls, in or outside the state dict."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("sum", torch.ones(2, 3), persistent=persistent)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        total, calls = self.get_buffer("sum"), self.get_buffer("calls")
        total.mul_(0.5).add_(x)
        calls.add_(1)
        return total * calls


def x_of(call: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(call))


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_are_updated_as_by_the_model(persistent: bool) -> None:
    model, eager = Counter(persistent), Counter(persistent)
    config = CompileConfig(target="cpu:reference", verify=True, check_numerics=True)
    compiled = kimigraph.optimize(model, (x_of(0),), config=config)
    verify = compiled.report().verify
    assert verify is not None and verify["passed"]
    assert torch.equal(model.get_buffer("sum"), torch.ones(2, 3)) and model.get_buffer("calls") == 0
    for call in range(3):
        torch.testing.assert_close(compiled(x_of(call)), eager(x_of(call)))
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


def test_a_saved_program_updates_what_it_was_given(tmp_path: Path) -> None:
    model, eager = Counter(), Counter()
    config = CompileConfig(target="cpu:reference")
    kimigraph.optimize(model, (x_of(0),), config=config).save(tmp_path / "artifact")
    loaded = kimigraph.load(tmp_path / "artifact", weights=model.state_dict())
    for call in range(2):
        torch.testing.assert_close(loaded(x_of(call)), eager(x_of(call)))
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


def test_verification_sees_a_wrong_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    from kimigraph import verify

    honest = verify.run_artifact

    def lost(*args: Any) -> verify.StepValues:
        values = honest(*args).values
        return verify.StepValues({**values, "sum": values["sum"] + 1})

    monkeypatch.setattr(verify, "run_artifact", lost)
    with pytest.raises(NumericsError, match="sum differs"):
        kimigraph.optimize(Counter(), (x_of(0),), config=CompileConfig(target="cpu:reference", verify=True))
