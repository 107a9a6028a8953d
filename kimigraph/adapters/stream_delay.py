# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""A kernel that keeps its stream for as long as memory on the device says, and does nothing else."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def hold(durations, place):
    """Keep a stream for ``durations[place]`` nanoseconds."""
    end = globaltimer() + tl.load(durations + place)
    now = globaltimer()
    while now < end:
        now = globaltimer()


def hold_stream(durations: torch.Tensor, place: int) -> None:
    """Queue a delay of ``durations[place]`` (int64, nanoseconds, read when it begins) on the current stream."""
    launch: Any = hold[(1,)]
    launch(durations, place, num_warps=1)
