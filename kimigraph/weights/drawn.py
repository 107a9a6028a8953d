"""Random weights made on the device that they will lie on: for models too large to be drawn on the CPU first."""

from dataclasses import replace

import torch
from torch import Tensor

from kimigraph.ir.program import InputSpec
from kimigraph.ir.seeded import generator


def drawn_weight(spec: InputSpec, seed: int, device: torch.device, rank: int = 0) -> Tensor:
    """The random weight of that name, or the part of it that ``rank`` has.

    It has the distributions of ``seeded_tensor`` but other values: they come from the device's own generator, in the
    weight's own type and strides, so that no second tensor is made on the way.
    """
    if spec.shared is not None:
        stride = torch.empty(spec.whole_shape, device="meta").stride()
        whole = replace(spec, shape=spec.whole_shape, stride=stride, share=None)
        return spec.taken(drawn_weight(whole, seed, device), rank)
    random = torch.Generator(device).manual_seed(generator(seed, spec.source).initial_seed())
    tensor = torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device=device)
    if spec.source.endswith("A_log"):
        return tensor.uniform_(0, 1, generator=random)
    if len(spec.shape) > 1:
        return tensor.normal_(0, max(spec.shape[-1], 1) ** -0.5, generator=random)
    centre = 1.0 if "norm" in spec.source and not spec.source.endswith("bias") else 0.0
    return tensor.normal_(centre, 0.1, generator=random)
