"""Groups of consecutive elements of the last dimension, which share a scale."""

import torch


def split_groups(values: torch.Tensor, group: int) -> torch.Tensor:
    """[..., D] -> [..., ceil(D / group), group]; where ``group`` does not divide D, zeros fill the last one."""
    missing = -values.shape[-1] % group
    filled = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return filled.unflatten(-1, (filled.shape[-1] // group, group))


def join_groups(groups: torch.Tensor, width: int) -> torch.Tensor:
    """[..., ceil(D / group), group] -> contiguous [..., D], D being ``width``: the fill is left out."""
    return groups.flatten(-2)[..., :width].clone(memory_format=torch.contiguous_format)
