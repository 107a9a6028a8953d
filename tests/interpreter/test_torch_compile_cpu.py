"""``torch.compile`` with target ``cpu``: generated kernels under the interpreter give the values of eager."""

import torch
from torch import Tensor, nn

from kimigraph import TorchBackend


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        cache.mul_(0.5).add_(torch.tanh(self.project(x)) * x)
        return torch.sigmoid(cache) * x + 1


@torch.no_grad()
def test_kernels_of_a_compiled_model_update_its_cache() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, backend = Step().eval(), TorchBackend(target="cpu")
    step, mine, theirs = torch.compile(model, backend=backend), torch.ones(3, 16), torch.ones(3, 16)
    for _ in range(2):
        x = torch.randn(3, 16)
        torch.testing.assert_close(step(x, mine), model(x, theirs))
        torch.testing.assert_close(mine, theirs)
    (report,) = backend.report()
    assert report.target == "cpu" and report.kernels
