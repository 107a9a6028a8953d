"""Whether tensors look as others did: torch's own check, which compares a tensor in a tenth of a microsecond."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Guard = Callable[..., bool]


def tensor_guard(tensors: Sequence[torch.Tensor]) -> Guard:
    """A function that says whether its arguments, as many, have the types, devices, dtypes, sizes and strides of these.

    It may say no to some that do (under inference mode, or with gradients where these had none), never yes to others.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return _comparison(tensors)
    sizes: Any = [list(tensor.size()) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guard.check


def _comparison(tensors: Sequence[torch.Tensor]) -> Guard:
    known = [_look(tensor) for tensor in tensors]
    return lambda *given: [_look(tensor) for tensor in given] == known


def _look(value: Any) -> Any:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return value.dtype, value.device, value.shape, value.stride()
