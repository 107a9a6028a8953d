"""Weights for a module that was built without them: seeded, or from a checkpoint's safetensors files."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from kimigraph.ir.errors import UsageError
from kimigraph.ir.seeded import seeded_tensor


def initialize(model: nn.Module, seed: int = 0, device: torch.device | str | None = None) -> nn.Module:
    """Give every parameter the seeded values of its name, on ``device`` (default: where it is; meta becomes CPU).

    Parameters are replaced one at a time, so that a model built on the meta device never needs more memory than its
    own and one fp32 tensor. Returns the model.
    """
    for name, parameter in list(model.named_parameters()):
        values = seeded_tensor(name, tuple(parameter.shape), parameter.dtype, kind="weight", seed=seed)
        _replace(model, name, values.to(_place(parameter, device)))
    return model


def load_weights(model: nn.Module, directory: Path, device: torch.device | str | None = None) -> nn.Module:
    """Give every parameter its tensor of the ``*.safetensors`` files in ``directory``, cast to the parameter's type.

    Returns the model. Raises UsageError when there are no such files, or when a name or a shape does not fit.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{directory}: holds no *.safetensors files; add the weights, or ask for random ones")
    wanted = dict(model.named_parameters())
    for path in files:
        with safe_open(path, framework="pt") as file:
            names: list[str] = list(file.keys())
            for name in names:
                if name not in wanted:
                    raise UsageError(f"{path}: tensor {name!r} is no parameter of this model")
                parameter, values = wanted.pop(name), file.get_tensor(name)
                if values.shape != parameter.shape:
                    raise UsageError(
                        f"{path}: tensor {name!r} is {tuple(values.shape)}, the configuration asks for"
                        f" {tuple(parameter.shape)}"
                    )
                _replace(model, name, values.to(_place(parameter, device), parameter.dtype))
    if wanted:
        raise UsageError(f"{directory}: {len(wanted)} parameters have no tensor, the first is {next(iter(wanted))!r}")
    return model


def _place(parameter: Tensor, device: torch.device | str | None) -> torch.device | str:
    return device or ("cpu" if parameter.is_meta else parameter.device)


def _replace(model: nn.Module, name: str, values: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).register_parameter(leaf, nn.Parameter(values, requires_grad=False))
