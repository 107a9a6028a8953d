"""Quantized weights of checkpoints, as the real ones that they stand for.

``mxfp4-pack-quantized`` (compressed-tensors; Kimi K3's experts): ``weight_packed`` uint8 [rows, columns / 2] holds two
E2M1 numbers a byte, the lower half first; ``weight_scale`` E8M0 [rows, columns / 32]. ``fp8`` (DeepSeek-V3.2):
``weight`` E4M3 with ``weight_scale_inv``, an fp32 factor for each block of 128 by 128.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kimigraph.ir.errors import UsageError
from kimigraph.ir.reference.mxfp4_quantize import GROUP, e2m1_numbers
from kimigraph.weights.checkpoint import Checkpoint
from kimigraph.weights.shard import StoredTensor

BLOCK = 128
"""Rows, and columns, that share one scale in fp8."""
MARKS = (".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_shape", ".weight_global_scale")
"""Endings of tensors that belong to a quantized weight."""


class Source(Protocol):
    """A published tensor: where it begins, and how to read it."""

    @property
    def path(self) -> Path: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    def read(self) -> Tensor:
        """The values, on the CPU."""
        ...


@dataclass(frozen=True)
class _Scaled:
    """A quantized weight; it is read in fp32."""

    values: StoredTensor
    scale: StoredTensor
    dtype: str = "F32"

    @property
    def path(self) -> Path:
        return self.values.path

    @property
    def begin(self) -> int:
        return self.values.begin

    @property
    def end(self) -> int:
        return self.values.end


@dataclass(frozen=True)
class Mxfp4(_Scaled):
    """``weight_packed`` with its ``weight_scale``."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.values.shape[0], 2 * self.values.shape[1])

    def read(self) -> Tensor:
        return e2m1_numbers(self.values.read(), self.scale.read().view(torch.uint8))


@dataclass(frozen=True)
class BlockFp8(_Scaled):
    """``weight`` in E4M3 with its ``weight_scale_inv``."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read(self) -> Tensor:
        rows, columns = self.shape
        scales = self.scale.read().float().repeat_interleave(BLOCK, 0)[:rows]
        return self.values.read().float() * scales.repeat_interleave(BLOCK, 1)[:, :columns]


def real_tensors(checkpoint: Checkpoint) -> dict[str, Source]:
    """All tensors of the checkpoint, quantized weights under the names of the real ones.

    Raises UsageError, which names the format, when some are in a format that is not read.
    """
    stored = checkpoint.tensors
    tensors: dict[str, Source] = dict(stored)
    for name, values in stored.items():
        if real := _mxfp4(name, values, stored) or _block_fp8(name, values, stored):
            del tensors[name], tensors[_scale_name(name)]
            tensors[name.removesuffix("_packed")] = real
    unread = sorted(n for n, t in tensors.items() if n.endswith(MARKS) or t.dtype.startswith(("F4", "F6", "F8")))
    if unread:
        raise UsageError(
            f"{checkpoint.directory} holds weights in {checkpoint.quantization or 'a quantized format'} that is not "
            f"read ({len(unread)} tensors, first {unread[0]}, {tensors[unread[0]].dtype} "
            f"{list(tensors[unread[0]].shape)}): give a checkpoint in bfloat16, mxfp4-pack-quantized or block fp8"
        )
    return tensors


def _scale_name(name: str) -> str:
    packed = name.endswith(".weight_packed")
    return name.removesuffix("_packed") + "_scale" if packed else name + "_scale_inv"


def _mxfp4(name: str, values: StoredTensor, stored: Mapping[str, StoredTensor]) -> Mxfp4 | None:
    scale = stored.get(_scale_name(name))
    if not name.endswith(".weight_packed") or scale is None or scale.dtype not in ("U8", "F8_E8M0"):
        return None
    fits = values.dtype == "U8" and len(values.shape) == 2 and 2 * values.shape[1] % GROUP == 0
    return Mxfp4(values, scale) if fits and scale.shape == (values.shape[0], 2 * values.shape[1] // GROUP) else None


def _block_fp8(name: str, values: StoredTensor, stored: Mapping[str, StoredTensor]) -> BlockFp8 | None:
    scale = stored.get(_scale_name(name))
    if not name.endswith(".weight") or scale is None or scale.dtype != "F32":
        return None
    fits = values.dtype == "F8_E4M3" and scale.shape == tuple(-(-size // BLOCK) for size in values.shape)
    return BlockFp8(values, scale) if fits and len(values.shape) == 2 else None
