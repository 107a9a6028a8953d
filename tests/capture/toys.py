"""Small modules and their example inputs, named from tests as ``toys:function``."""

from typing import Any

import torch
from torch import Tensor, nn


class RunningSum(nn.Module):
    """Adds to a cache it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: dict[str, Tensor], *, bias: float = 0.0) -> dict[str, Any]:
        cache["state.0.sum"].add_(self.linear(x))
        return {"out": cache["state.0.sum"] * 2 + bias, "nothing": None}


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # line 23
            return x
        return -x


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(2)  # line 30


class HiddenState(nn.Module):
    def __init__(self, in_list: bool) -> None:
        super().__init__()
        self.kept = [torch.zeros(2)] if in_list else torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.kept[0] if isinstance(self.kept, list) else self.kept
        kept.add_(1)
        return x + kept


class Tied(nn.Module):
    """One weight under two names, a table outside the state dict, a tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("scale", torch.ones(3))
        self.shift = torch.ones(3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids) * self.get_buffer("table") * self.get_buffer("scale") + self.shift)


def running_sum() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return RunningSum(), {"cache": {"state.0.sum": torch.zeros(2, 4)}, "x": torch.ones(2, 4)}


def running_sum_of_views() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return RunningSum(), (torch.ones(4, 2).t(), {"state.0.sum": torch.zeros(9)[1:].view(2, 4)})


def branches() -> tuple[nn.Module, tuple[Any, ...]]:
    return Branches(), (torch.ones(2),)


def no_module() -> tuple[int, tuple[Any, ...]]:
    return 3, ()


def module_alone() -> nn.Module:
    return Branches()


NOT_CALLABLE = 3
