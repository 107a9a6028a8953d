"""Seeded random weights: each parameter's values follow from the seed and its name alone."""

import torch
from torch import nn

from kimigraph.ir.seeded import seeded_tensor


def initialize(model: nn.Module, seed: int = 0, device: torch.device | str | None = None) -> nn.Module:
    """Give every parameter the seeded values of its name, on ``device`` (default: where it is; meta becomes CPU).

    Parameters are replaced one at a time, so that a model built on the meta device never needs more memory than its
    own and one fp32 tensor. Returns the model.
    """
    for name, parameter in list(model.named_parameters()):
        values = seeded_tensor(name, tuple(parameter.shape), parameter.dtype, kind="weight", seed=seed)
        owner, _, leaf = name.rpartition(".")
        place = device or ("cpu" if parameter.is_meta else parameter.device)
        model.get_submodule(owner).register_parameter(leaf, nn.Parameter(values.to(place), requires_grad=False))
    return model
