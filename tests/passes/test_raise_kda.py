"""``raise-kda`` on a written-out step: every spelling of the delta rule, gates and neighbours is one operator."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from kimigraph.capture import capture_module
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.passes.raise_kda import RaiseKda

ATEN = torch.ops.aten
B, H, K, V, W = 2, 3, 4, 5, 4


@dataclass(frozen=True)
class Spelling:
    """How a model writes one step."""

    layout: str = "kv"
    columns: int = W - 1
    products: str = "sum"
    bounded: bool = True
    root: str = "rsqrt"
    beta_on_key: bool = False
    norm: bool = True
    gate: bool = True

    def __str__(self) -> str:
        return (
            ",".join(f"{key}={value}" for key, value in vars(self).items() if value != getattr(Spelling, key))
            or "plain"
        )


def step(spelling: Spelling) -> Callable[..., Tensor]:
    """The step as a function of the operator's own operands."""

    def contract(memory: Tensor, vector: Tensor) -> Tensor:
        """Sum over the key axis."""
        if spelling.products == "sum":
            return (memory * vector.unsqueeze(-1 if spelling.layout == "kv" else -2)).sum(
                -2 if spelling.layout == "kv" else -1
            )
        matrix = memory.transpose(-1, -2) if spelling.layout == "kv" else memory
        return (matrix @ vector.unsqueeze(-1)).squeeze(-1)

    def outer(key: Tensor, value: Tensor) -> Tensor:
        rows, columns = (key, value) if spelling.layout == "kv" else (value, key)
        if spelling.products == "sum":
            return rows.unsqueeze(-1) * columns.unsqueeze(-2)
        return rows.unsqueeze(-1) @ columns.unsqueeze(-2)

    def normalised(x: Tensor) -> Tensor:
        total = x.square().sum(-1, keepdim=True) + 1e-6
        return x * torch.rsqrt(total) if spelling.root == "rsqrt" else x / total.sqrt()

    def run(
        qkv: Tensor,
        conv_weight: Tensor,
        conv_state: Tensor,
        gate: Tensor,
        dt_bias: Tensor,
        a_log: Tensor,
        beta: Tensor,
        state: Tensor,
        out_gate: Tensor,
        norm_weight: Tensor,
    ) -> Tensor:
        window = torch.cat([conv_state, qkv.transpose(1, 2)], -1)
        mixed = F.silu(F.conv1d(window, conv_weight, groups=conv_weight.shape[0])[..., -1])
        conv_state.copy_(window[..., -spelling.columns :])
        q, k, v = (x.unflatten(-1, (H, -1)) for x in mixed.split([H * K, H * K, H * V], -1))
        logit = (gate[:, 0] + dt_bias).view(B, H, K)
        rate = a_log.exp().unsqueeze(-1)
        g = -5.0 * torch.sigmoid(rate * logit) if spelling.bounded else -rate * F.softplus(logit)
        strength = torch.sigmoid(beta[:, 0]).unsqueeze(-1)
        q, k = normalised(q) * K**-0.5, normalised(k)
        memory = state * g.exp().unsqueeze(-1 if spelling.layout == "kv" else -2)
        error = v - contract(memory, k)
        update = outer(k * strength, error) if spelling.beta_on_key else outer(k, error * strength)
        memory = memory + update
        out = contract(memory, q).unsqueeze(1)
        state.copy_(memory)
        if spelling.norm:
            out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-5) * norm_weight
        if spelling.gate:
            out = out * torch.sigmoid(out_gate)
        return out.flatten(2).cos()

    return run


def tensors(spelling: Spelling) -> list[Tensor]:
    channels = H * (2 * K + V)
    sizes = (B, H, K, V) if spelling.layout == "kv" else (B, H, V, K)
    return [
        torch.randn(B, 1, channels),
        torch.randn(channels, 1, W),
        torch.randn(B, channels, spelling.columns),
        torch.randn(B, 1, H * K),
        torch.randn(H * K),
        torch.rand(H),
        torch.randn(B, 1, H),
        torch.randn(sizes),
        torch.randn(B, 1, H, V),
        torch.randn(V),
    ]


class Step(torch.nn.Module):
    """A function as a module, for capture."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        return self.function(*given)


def raised(program: CapturedProgram) -> list[Node]:
    return [node for node in program.graph_module.graph.nodes if node.target is OPERATORS["kda_decode"].overload]


PLAIN = Spelling()


@pytest.mark.parametrize(
    "spelling",
    [
        PLAIN,
        replace(PLAIN, layout="vk"),
        replace(PLAIN, columns=W),
        replace(PLAIN, products="matmul"),
        replace(PLAIN, products="matmul", layout="vk"),
        replace(PLAIN, bounded=False),
        replace(PLAIN, root="sqrt"),
        replace(PLAIN, beta_on_key=True),
        replace(PLAIN, norm=False),
        replace(PLAIN, gate=False),
        replace(PLAIN, norm=False, gate=False),
    ],
    ids=str,
)
def test_every_spelling_is_one_operator(spelling: Spelling, run: Callable[..., Any], context: PassContext) -> None:
    given = tensors(spelling)
    program = capture_module(Step(step(spelling)), tuple(x.clone() for x in given), {}, context.config)
    expected = run(program, *given)
    run_pipeline(program, Pipeline((Canonicalize(), RaiseKda())), context)
    (node,) = raised(program)
    assert node.kwargs["state_layout"] == spelling.layout
    assert node.kwargs["lower_bound"] == (-5.0 if spelling.bounded else None)
    assert (node.args[9] is not None, node.args[8] is not None) == (spelling.norm, spelling.gate)
    left = {n.target for n in program.graph_module.graph.nodes if n.op == "call_function"}
    assert not left & {ATEN.copy_.default, ATEN.convolution.default, ATEN.conv1d.default, ATEN.exp.default}
    for old, new in zip(expected, run(program, *given), strict=True):
        for a, b in zip(old, new, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5)
