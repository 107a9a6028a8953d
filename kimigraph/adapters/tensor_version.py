"""The counter with which torch tells that a tensor was written."""

import torch


def tensor_version(tensor: torch.Tensor) -> int:
    """A number that every write in place raises; 0 for tensors made under inference mode, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def tensor_versions(tensors: list[torch.Tensor]) -> list[int]:
    """``tensor_version`` of many that were not made under inference mode, in as little time as Python takes."""
    return [tensor._version for tensor in tensors]
