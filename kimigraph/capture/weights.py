"""Seeded weights of a model, and the names of its types."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode

from kimigraph.ir.errors import UsageError
from kimigraph.ir.seeded import seeded_tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_named(name: str) -> torch.dtype:
    """The torch type of ``float32``, ``bfloat16`` or ``float16``; UsageError for another name."""
    if name.removeprefix("torch.") not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}: use --dtype with one of {', '.join(DTYPES)}")
    return DTYPES[name.removeprefix("torch.")]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` as ``float32``."""
    return str(dtype).removeprefix("torch.")


_RANDOM = (Tensor.normal_, Tensor.uniform_, init.normal_, init.uniform_, init.kaiming_uniform_)


class NoRandomValues(TorchFunctionMode):
    """Inside the block, modules do not fill their new parameters with random values: their weights come afterwards.

    On the meta device drawing them would import torch's own compiler, which is most of a warm start.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def seed_weights(module: nn.Module, seed: int) -> None:
    """Fill every floating tensor of the state dict with its seeded values, in place.

    Tied tensors are filled once, under their first name. Buffers outside the state dict (rotary tables) and integer
    buffers keep what the model computed.
    """
    filled: set[int] = set()
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and id(tensor) not in filled:
                filled.add(id(tensor))
                tensor.data.copy_(seeded_tensor(name, tensor.shape, tensor.dtype, "weight", seed))
