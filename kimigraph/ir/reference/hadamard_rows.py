"""Reference of ``kimigraph::hadamard_rows``."""

import torch

from kimigraph.ir.reference.hadamard import hadamard_mixed


def hadamard_rows(weight: torch.Tensor, *, width: int) -> torch.Tensor:
    """See ``kimigraph.ir.operators.hadamard_rows``: each ``width`` rows of [N, K] mixed as a row's elements are."""
    blocks = weight.unflatten(0, (-1, width)).transpose(1, 2)
    mixed = hadamard_mixed(blocks).transpose(1, 2).flatten(0, 1).to(weight.dtype)
    return mixed.clone(memory_format=torch.contiguous_format)
