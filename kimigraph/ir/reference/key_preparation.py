"""What the cache writers do to a row before it is stored: a norm, rotation. Bits do not depend on how sums run."""

import torch


def layer_normed(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Layer norm over the last dim in fp32; the statistics are fp64 sums, which any order of adding gives alike."""
    if weight is None:
        return x
    wide = x.double()
    mean = wide.mean(dim=-1, keepdim=True)
    spread = (wide - mean).square().mean(dim=-1, keepdim=True)
    scale = (1.0 / (spread + eps).sqrt()).float()
    normed = (x.float() - mean.float()) * scale * weight.float()
    return normed if bias is None else normed + bias.float()


def root_mean_square_normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm over the last dim in fp32; the mean of squares is an fp64 sum, which any order of adding gives alike."""
    if weight is None:
        return x
    scale = (1.0 / (x.double().square().mean(dim=-1, keepdim=True) + eps).sqrt()).float()
    return x.float() * scale * weight.float()


def rotated(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, style: str) -> torch.Tensor:
    """The first dims of ``x`` [.., D], twice as many as ``cos`` and ``sin`` have, turned in fp32; the others as are.

    Pairs are (i, i + half) under ``half_split``, (2i, 2i + 1) under ``interleaved`` and ``deinterleaved``, which puts
    them to i and i + half; ``none`` turns nothing.
    """
    if style == "none" or cos is None or sin is None:
        return x
    cos, sin, half = cos.float(), sin.float(), cos.shape[-1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :].float()
    if style == "half_split":
        first, second = turned[..., :half], turned[..., half:]
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    first, second = first * cos - second * sin, second * cos + first * sin
    if style == "interleaved":
        return torch.cat([torch.stack([first, second], dim=-1).flatten(-2), rest], dim=-1)
    return torch.cat([first, second, rest], dim=-1)
