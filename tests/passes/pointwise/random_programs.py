"""Random programs out of pointwise work, reductions, views and writes in place, for tests of fused pointwise work."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Operation = Callable[[Tensor, Tensor, "Given"], Tensor]


@dataclass(frozen=True)
class Given:
    """What every operation may use: an index and a mask of the operands' shape, a square weight."""

    index: Tensor
    mask: Tensor
    weight: Tensor


def norm(a: Tensor) -> Tensor:
    wide = a.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(a.dtype)


def layer_norm(a: Tensor) -> Tensor:
    wide = a.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return (centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-3)).to(a.dtype)


def rotated(a: Tensor) -> Tensor:
    half = a.shape[1] // 2
    return torch.cat([-a[:, half:], a[:, :half]], 1)


PURE: dict[str, Operation] = {
    "add": lambda a, b, g: a + b,
    "sub-scaled": lambda a, b, g: torch.sub(a, b, alpha=2),
    "mul": lambda a, b, g: a * b.tanh(),
    "div": lambda a, b, g: a / (b.abs() + 1),
    "sigmoid": lambda a, b, g: torch.sigmoid(a) * 3,
    "silu": lambda a, b, g: torch.nn.functional.silu(a),
    "tanh": lambda a, b, g: torch.tanh(a),
    "softplus": lambda a, b, g: torch.nn.functional.softplus(a),
    "relu": lambda a, b, g: a.relu() - 0.25,
    "clamp": lambda a, b, g: a.clamp(-1, 2),
    "where": lambda a, b, g: torch.where(g.mask, a, b),
    "fill": lambda a, b, g: a.masked_fill(g.mask, 0.5),
    "maximum": lambda a, b, g: torch.maximum(a, b),
    "to-bf16": lambda a, b, g: a.to(torch.bfloat16),
    "to-fp16": lambda a, b, g: (a.clamp(-100, 100)).to(torch.float16),
    "to-fp32": lambda a, b, g: a.float(),
    "by-count": lambda a, b, g: a * torch.arange(a.shape[1], device=a.device),
    "ones": lambda a, b, g: torch.where(~torch.ones_like(g.mask) | g.mask, a, torch.full_like(b, 0.5).exp()),
    "int": lambda a, b, g: g.index * 2 + a,
}
REDUCING: dict[str, Operation] = {
    "row-sum": lambda a, b, g: a + b.sum(-1, keepdim=True) * 0.1,
    "column-mean": lambda a, b, g: a - b.mean(0, keepdim=True),
    "softmax": lambda a, b, g: torch.softmax(a, -1),
    "softmax-0": lambda a, b, g: torch.softmax(a.float(), 0).to(a.dtype),
    "norm": lambda a, b, g: norm(a),
    "layer-norm": lambda a, b, g: layer_norm(a),
    "l2": lambda a, b, g: a / torch.linalg.vector_norm(a, dim=-1, keepdim=True).clamp_min(1e-2),
    "amax": lambda a, b, g: a - a.amax(-1, keepdim=True),
    "any": lambda a, b, g: a * g.mask.any(-1, keepdim=True),
}
MOVING: dict[str, Operation] = {
    "turn": lambda a, b, g: a.t().contiguous().t(),
    "reshape": lambda a, b, g: a.reshape(a.shape[1], a.shape[0]).t(),
    "heads": lambda a, b, g: a.reshape(a.shape[0], 2, -1).transpose(1, 2).reshape(a.shape),
    "rotate": lambda a, b, g: rotated(a),
    "join": lambda a, b, g: torch.cat([a[:, 1:], b[:, :1].to(a.dtype)], 1),
    "expand": lambda a, b, g: a[:, :1].expand(a.shape) + b,
    "flip": lambda a, b, g: a.flip(1),
    "gather": lambda a, b, g: a.gather(1, g.index),
    "rows": lambda a, b, g: a[g.index[:, 0] % a.shape[0]],
    "pad": lambda a, b, g: torch.nn.functional.pad(a[:, :-2], (1, 1)),
    "stack": lambda a, b, g: torch.stack([a, b.to(a.dtype)], 1).sum(1),
    "put": lambda a, b, g: torch.select_scatter(a, b[0].to(a.dtype), 0, 1),
    "split": lambda a, b, g: torch.cat([part * (n + 1) for n, part in enumerate(a.split(2, 1))], 1),
}
# Eager refuses to write a turned view of the target into it, so operands are made anew.
WRITING: dict[str, Operation] = {
    "copy": lambda a, b, g: a.copy_(b * 1),
    "add": lambda a, b, g: a.add_(b * 1),
    "decay": lambda a, b, g: a.mul_(0.5),
    "part": lambda a, b, g: a[:, 1:].copy_(b[:, 1:]).sum(-1, keepdim=True) + b,
    "row": lambda a, b, g: a[1].fill_(0.5).expand(b.shape) * b,
    "rows": lambda a, b, g: a.index_put_([g.index[:1, 0] % a.shape[0]], (b[:1] * 1).to(a.dtype)).clone(),
}
OTHER: dict[str, Operation] = {
    "product": lambda a, b, g: a.float() @ g.weight,
}
TABLES = {"pure": PURE, "reducing": REDUCING, "moving": MOVING, "writing": WRITING, "other": OTHER}


@dataclass(frozen=True)
class Step:
    """One operation on two earlier values, by number counted from the newest; a write's target is always the state."""

    kind: str
    name: str
    left: int
    right: int
    operation: Operation = field(repr=False, compare=False)


@dataclass(frozen=True)
class RandomProgram:
    """Steps over x, y and a state that writes change; ``outputs`` counts from the newest value."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    shape: tuple[int, int]
    dtype: torch.dtype

    def __call__(self, x: Tensor, y: Tensor, state: Tensor, index: Tensor, mask: Tensor, weight: Tensor) -> Any:
        given = Given(index, mask, weight)
        values = [x, y, state]
        for step in self.steps:
            left = state if step.kind == "writing" else values[-1 - step.left % len(values)]
            values.append(step.operation(left, values[-1 - step.right % len(values)], given))
        return tuple(values[-1 - output % len(values)] * 1 for output in self.outputs)

    def tensors(self, device: str = "cpu") -> list[Tensor]:
        """Operands: N(0, 1), an index below the number of columns, a mask."""
        generator = torch.Generator().manual_seed(0)
        columns = self.shape[1]
        x, y, state = (torch.randn(self.shape, generator=generator).to(self.dtype) for _ in range(3))
        index = torch.randint(0, columns, self.shape, generator=generator)
        mask = torch.rand(self.shape, generator=generator) > 0.5
        weight = torch.randn(columns, columns, generator=generator) * 0.3
        return [tensor.to(device) for tensor in (x, y, state, index, mask, weight)]


@st.composite
def steps(draw: st.DrawFn, kinds: tuple[str, ...]) -> Step:
    kind = draw(st.sampled_from(kinds))
    name = draw(st.sampled_from(sorted(TABLES[kind])))
    return Step(kind, name, draw(st.integers(0, 3)), draw(st.integers(0, 4)), TABLES[kind][name])


def programs(most: int = 9) -> st.SearchStrategy[RandomProgram]:
    """Programs of up to ``most`` steps."""
    kinds = ("pure", "pure", "pure", "reducing", "moving", "moving", "writing", "other")
    return st.builds(
        RandomProgram,
        st.lists(steps(kinds), min_size=2, max_size=most).map(tuple),
        st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
        st.sampled_from([(4, 6), (3, 8), (5, 4), (6, 6)]),
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    )
