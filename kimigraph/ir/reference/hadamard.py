"""The Hadamard rotation of rows: an orthonormal mix of all their elements, in which none stands out."""

import torch


def hadamard_rotated(x: torch.Tensor) -> torch.Tensor:
    """[..., D], D a power of two -> fp32 [..., D]: times the Hadamard matrix (Sylvester's order) over sqrt(D).

    Its own inverse. Sums are fp64, which any order of adding gives alike. ValueError for another D.
    """
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ValueError(f"a row of {width} elements has no Hadamard rotation, want a power of two")
    return hadamard_mixed(x).float()


def hadamard_mixed(x: torch.Tensor) -> torch.Tensor:
    """[..., D] -> fp64 [..., D] times the Hadamard matrix over sqrt(D)."""
    width, rows, step = x.shape[-1], x.double(), 1
    while step < width:
        pairs = rows.unflatten(-1, (width // (2 * step), 2, step))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        rows = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        step *= 2
    return rows * width**-0.5
