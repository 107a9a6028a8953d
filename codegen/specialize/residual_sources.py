"""What the builders of attention residuals share: sources as rows, tiles of sources, weights as vectors."""

import math
from collections.abc import Sequence
from itertools import pairwise

from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import needed, padded, refuse

MOST_SOURCES = 9  # pointers that a kernel takes
ELEMENTS = 16  # of a source, a thread: as many 32-bit registers hold it, and as many the mixture
MOST_HELD = 128  # elements of all sources at once, a thread; 16-bit ones lie two in a register


def sources_of(request: KernelRequest) -> list[TensorSpec]:
    """The sources; CompileError where there are more than the kernel takes, or one is not rows of adjacent values."""
    names = [name for name in request.tensors if name.startswith("sources_")]
    if len(names) > MOST_SOURCES:
        raise refuse(
            request,
            f"{len(names)} sources",
            f"the kernel mixes at most {MOST_SOURCES}: give the model larger blocks (attn_res_block_size)",
        )
    return [needed(request, name) for name in names]


def row_stride(request: KernelRequest, name: str) -> int:
    """Elements from one token of ``name`` [..., D] to the next, in the order of tokens."""
    spec = needed(request, name)
    sizes = [(size, stride) for size, stride in zip(spec.shape[:-1], spec.stride[:-1], strict=True) if size > 1]
    flat = all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(sizes))
    if not flat or (spec.stride[-1] != 1 and spec.shape[-1] > 1):
        raise refuse(request, f"{name} has strides {list(spec.stride)}", "make it contiguous before the residual")
    return sizes[-1][1] if sizes else spec.shape[-1]


def is_aligned(spec: TensorSpec, stride: int) -> bool:
    """Whether each row starts at a multiple of 16 bytes."""
    return spec.aligned and stride * _itemsize(spec) % 16 == 0


def weight_strides(request: KernelRequest, names: Sequence[str]) -> tuple[int, ...]:
    """Stride of each weight's last dimension, 0 for one that is absent."""
    return tuple(0 if request.tensors.get(name) is None else needed(request, name).stride[-1] for name in names)


def tokens_of(spec: TensorSpec) -> int:
    """Rows of a source."""
    return math.prod(spec.shape[:-1])


def warps_for(width: int, elements: int = ELEMENTS) -> int:
    """Warps that hold a row of ``width`` values, ``elements`` a thread."""
    return min(max(padded(width) // (32 * elements), 1), 32)


def starts_early(request: KernelRequest) -> bool:
    """Whether programs may start while the kernel before theirs still runs: only NVIDIA's launches know how."""
    return request.target.startswith("cuda")


def early_options(early: bool) -> dict[str, bool]:
    """Triton's option for such a launch."""
    return {"launch_pdl": True} if early else {}


def tiles(sources: int, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First source and number of sources of each tile: powers of two, no more than ``most``, the largest first."""
    first: list[int] = []
    rows: list[int] = []
    while sum(rows) < sources:
        first.append(sum(rows))
        rows.append(min(most, 1 << ((sources - sum(rows)).bit_length() - 1)))
    return tuple(first), tuple(rows)


def _itemsize(spec: TensorSpec) -> int:
    return 4 if spec.dtype == "float32" else 2
