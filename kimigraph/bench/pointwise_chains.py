"""Chains of pointwise work as models spell them, with their operands."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Chain:
    """A function of tensors; ``shapes`` gives those of its operands for a number of tokens, with their types."""

    name: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: Callable[[int], list[tuple[tuple[int, ...], torch.dtype]]]

    def operands(self, tokens: int) -> list[Tensor]:
        """Random operands on the GPU, N(0, 1)."""
        return [torch.randn(shape, device="cuda").to(dtype) for shape, dtype in self.shapes(tokens)]

    def module(self) -> nn.Module:
        """The function as a module, which can be captured."""
        return _Wrapped(self.function)

    def bytes(self, tokens: int) -> int:
        """Bytes of the operands."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.shapes(tokens))


class _Wrapped(nn.Module):
    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The function's result."""
        return self.function(*operands)


BF16, FP32 = torch.bfloat16, torch.float32


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """In fp32, rounded once."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.float()).to(x.dtype)


def residual_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and its norm."""
    total = x + residual
    return total, rms_norm(total, weight)


def rope(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The half-split rotation of heads [B, S, H, D]."""
    half = q.shape[-1] // 2
    turned = torch.cat([-q[..., half:], q[..., :half]], dim=-1)
    return q * cos.unsqueeze(2) + turned * sin.unsqueeze(2)


def silu_gate(both: Tensor) -> Tensor:
    """SwiGLU of one product's two halves."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def situ_gate(gate: Tensor, up: Tensor) -> Tensor:
    """The gate of Kimi K3, in fp32."""
    wide, linear = gate.float(), up.float()
    activated = 4.0 * torch.tanh(wide / 4.0) * torch.sigmoid(wide)
    return (activated * (25.0 * torch.tanh(linear / 25.0))).to(gate.dtype)


def cast_chain(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Casts up and down with a clamp between, both types used."""
    wide = (x.float() * scale + shift).clamp(-3.0, 3.0)
    return wide, wide.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """LayerNorm, then a residual sum."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-6) + x


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax of masked scores in fp32."""
    return torch.softmax(scores.float().masked_fill(mask < 0, float("-inf")), dim=-1).to(scores.dtype)


def head_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Heads [B, H, D] laid side by side, times a sigmoid."""
    return x.transpose(1, 2).reshape(x.shape[0], -1) * torch.sigmoid(gate)


CHAINS = (
    Chain("rms_norm", rms_norm, lambda n: [((n, 7168), BF16), ((7168,), BF16)]),
    Chain("residual_norm", residual_norm, lambda n: [((n, 7168), BF16), ((n, 7168), BF16), ((7168,), BF16)]),
    Chain("rope", rope, lambda n: [((n, 1, 64, 64), BF16), ((n, 1, 64), BF16), ((n, 1, 64), BF16)]),
    Chain("silu_gate", silu_gate, lambda n: [((n, 2 * 6144), BF16)]),
    Chain("situ_gate", situ_gate, lambda n: [((n, 6144), BF16), ((n, 6144), BF16)]),
    Chain("cast_chain", cast_chain, lambda n: [((n, 7168), BF16), ((7168,), FP32), ((7168,), FP32)]),
    Chain("layer_norm", layer_norm, lambda n: [((n, 2304), BF16), ((2304,), BF16), ((2304,), BF16)]),
    Chain("masked_softmax", masked_softmax, lambda n: [((n, 16, 2048), BF16), ((n, 1, 2048), BF16)]),
    Chain("head_gate", head_gate, lambda n: [((n, 128, 64), BF16), ((n, 8192), BF16)]),
)
