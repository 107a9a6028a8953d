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
from kimigraph.capture.marks import marked
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import Remark
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.passes.raise_kda import RaiseKda

ATEN = torch.ops.aten
B, H, K, V, W, T = 2, 3, 4, 5, 4, 6


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
    one_decay: bool = False
    key_heads: int = H

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
        keys = spelling.key_heads * K
        q, k, v = (
            x.unflatten(-1, (-1, width))
            for x, width in zip(mixed.split([keys, keys, H * V], -1), (K, K, V), strict=True)
        )
        if spelling.key_heads != H:
            q, k = (x.repeat_interleave(H // spelling.key_heads, dim=1) for x in (q, k))
        logit = (gate[:, 0] + dt_bias).view(B, H, -1)
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
    channels = 2 * spelling.key_heads * K + H * V
    width = H if spelling.one_decay else H * K
    sizes = (B, H, K, V) if spelling.layout == "kv" else (B, H, V, K)
    return [
        torch.randn(B, 1, channels),
        torch.randn(channels, 1, W),
        torch.randn(B, channels, spelling.columns),
        torch.randn(B, 1, width),
        torch.randn(width),
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


def raised(program: CapturedProgram, name: str = "kda_decode") -> list[Node]:
    return [node for node in program.graph_module.graph.nodes if node.target is OPERATORS[name].overload]


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
        replace(PLAIN, one_decay=True),
        replace(PLAIN, one_decay=True, bounded=False, layout="vk"),
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


def missed(program: CapturedProgram, context: PassContext) -> Remark:
    """The one refusal of the pass."""
    result = RaiseKda().apply(program, context)
    assert not result.modified
    (remark,) = result.remarks
    assert remark.kind == "missed" and remark.remedy
    return remark


def test_grouped_heads_are_refused_by_name(context: PassContext) -> None:
    spelling = replace(PLAIN, one_decay=True, bounded=False, key_heads=1)
    program = capture_module(Step(step(spelling)), tuple(tensors(spelling)), {}, context.config)
    Canonicalize().apply(program, context)
    assert "grouped, as in GDN" in missed(program, context).message


def prefill(bounded: bool = True, strength: str = "sigmoid", one_decay: bool = False) -> Callable[..., Tensor]:
    """A marked prefill whose gate and strength are computed before it."""

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, dt_bias: Tensor, a_log: Tensor, beta: Tensor) -> Tensor:
        rate = a_log.exp().unsqueeze(-1)
        logit = (gate.float() + dt_bias).view(B, T, H, -1)
        g = -5.0 * torch.sigmoid(rate * logit) if bounded else -rate * F.softplus(logit)
        beta = torch.sigmoid(beta.float()) if strength == "sigmoid" else torch.tanh(beta.float())
        g = g.expand(B, T, H, K) if one_decay else g
        out, state = torch.ops.kimigraph.kda_prefill(q, k, v, g, beta, scale=0.5, l2_norm=True)
        return torch.cat([out.flatten(), state.flatten()])

    return run


def prefill_tensors(one_decay: bool = False, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    width = H if one_decay else H * K
    return [
        torch.randn(B, T, H, K),
        torch.randn(B, T, H, K),
        torch.randn(B, T, H, V),
        torch.randn(B, T, width).to(dtype),
        torch.randn(width),
        torch.rand(H),
        torch.randn(B, T, H).to(dtype),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounded", [True, False])
def test_a_marked_prefill_takes_its_gate_inside(
    bounded: bool, dtype: torch.dtype, run: Callable[..., Any], context: PassContext
) -> None:
    given = prefill_tensors(dtype=dtype)
    program = capture_module(Step(prefill(bounded)), tuple(given), {}, context.config)
    Canonicalize().apply(program, context)
    expected = run(program, *given)
    result = RaiseKda().apply(program, context)
    assert [remark.via for remark in result.remarks] == ["mark"]
    (node,) = raised(program, "kda_prefill")
    operands = dict(zip(("q", "k", "v", "g", "beta", "state", "a_log", "dt_bias"), node.args, strict=False))
    assert operands["g"].args[0].op == operands["beta"].op == operands["a_log"].op == "placeholder"
    assert operands["beta"].meta["val"].dtype is dtype and node.kwargs["lower_bound"] == (-5.0 if bounded else None)
    left = {n.target for n in program.graph_module.graph.nodes if n.op == "call_function"}
    assert not left & {ATEN.exp.default, ATEN.sigmoid.default, ATEN.softplus.default}
    torch.testing.assert_close(run(program, *given), expected, rtol=1e-5, atol=1e-5)
    assert not RaiseKda().apply(program, context).modified


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (prefill(strength="tanh"), "the raw gate or strength: expected sigmoid"),
        (prefill(one_decay=True), "one a head (GDN)"),
    ],
    ids=["tanh", "one decay"],
)
def test_another_gate_stays_in_front_of_the_prefill(
    function: Callable[..., Tensor], reason: str, context: PassContext
) -> None:
    given = prefill_tensors(one_decay="GDN" in reason)
    program = capture_module(Step(function), tuple(given), {}, context.config)
    Canonicalize().apply(program, context)
    assert reason in missed(program, context).message
    assert raised(program, "kda_prefill")


def test_the_chunks_of_qwen3_next_are_marked(context: PassContext) -> None:
    """One decay a head, q and k of fewer heads: the same operator, with a decay that repeats along the channels."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    given = [
        torch.randn(B, T, 1, K), torch.randn(B, T, 1, K), torch.randn(B, T, H, V), -torch.rand(B, T, H),
        torch.rand(B, T, H), torch.randn(B, H, K, V),
    ]  # fmt: skip

    def chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return modeling.torch_chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    expected = chunks(*given)
    with marked(replace(context.config, phase="prefill")):
        found = chunks(*given)
        program = capture_module(Step(chunks), tuple(given), {}, replace(context.config, phase="prefill"))
    assert raised(program, "kda_prefill")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
