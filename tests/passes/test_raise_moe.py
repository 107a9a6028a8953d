"""``raise-moe``: the forms in which blocks of experts are written, what they compute, and what is left alone."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear, one_hot, silu

from kimigraph.capture import capture_module
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.passes.base import PassContext
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.passes.raise_moe import RaiseMoe
from kimigraph.passes.raise_norms import RaiseNorms

E, K, D, INNER, OUT, WIDE = 6, 2, 8, 5, 12, 7
OPERATOR = torch.ops.kimigraph.moe_experts.default
TOPK = torch.ops.aten.topk.default


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate) * (25.0 * torch.tanh(up / 25.0))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def bounded(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate.clamp(max=2.0)) * up.clamp(-2.0, 2.0)


def gathered(x: Tensor, picks: Tensor, gate_up: Tensor, down: Tensor, act: Any) -> Tensor:
    flat = picks.reshape(-1)
    gate, up = torch.bmm(gate_up[flat], x.repeat_interleave(K, dim=0).unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    return torch.bmm(down[flat], act(gate, up).unsqueeze(-1)).squeeze(-1).unflatten(0, picks.shape)


def grouped(x: Tensor, picks: Tensor, gate_up: Tensor, down: Tensor, act: Any) -> Tensor:
    flat = picks.reshape(-1)
    order = torch.argsort(flat, stable=True)
    ends = one_hot(flat, E).sum(0).cumsum(0, dtype=torch.int32)
    gate, up = grouped_mm(x[order // K], gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
    outputs = grouped_mm(act(gate, up), down.transpose(-2, -1), offs=ends)
    return outputs[torch.argsort(order)].unflatten(0, picks.shape)


def exhaustive(x: Tensor, picks: Tensor, gate_up: Tensor, down: Tensor, act: Any) -> Tensor:
    gate, up = torch.matmul(x, gate_up.transpose(-2, -1)).chunk(2, dim=-1)
    outputs = torch.bmm(act(gate, up), down.transpose(-2, -1)).transpose(0, 1)
    return outputs.gather(1, picks.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


@dataclass(frozen=True)
class Block:
    """A way to write a block of experts; ``__call__`` runs it."""

    products: Any = gathered
    act: Any = situ
    score: Any = torch.sigmoid
    groups: int = 1
    guard: float = 1e-20
    fill: float = float("-inf")
    weigh_biased: bool = False
    latent: bool = True
    shared: bool = True
    shared_act: Any = None
    also: Any = None

    def __call__(
        self, x: Tensor, logits: Tensor, bias: Tensor, gate_up: Tensor, down: Tensor, norm: Tensor, up: Tensor,
        shared_gate: Tensor, shared_up: Tensor, shared_down: Tensor,
    ) -> Any:  # fmt: skip
        scores = self.score(logits)
        choice = scores + bias
        if self.groups > 1:
            best = choice.view(-1, self.groups, E // self.groups).topk(2, dim=-1)[0].sum(-1)
            kept = torch.topk(best, 2, dim=-1, sorted=False)[1]
            mask = torch.zeros_like(best).scatter(1, kept, 1).unsqueeze(-1)
            mask = mask.expand(-1, self.groups, E // self.groups).reshape(-1, E)
            choice = choice.masked_fill(~mask.bool(), self.fill)
        values, picks = torch.topk(choice, K, dim=-1, sorted=False)
        weights = (choice if self.weigh_biased else scores).gather(-1, picks)
        weights = weights / (weights.sum(-1, keepdim=True) + self.guard) * 1.5
        outputs = self.products(x, picks, gate_up, down, self.act)
        out = (outputs.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)
        if self.latent:
            wide = out.float()
            out = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm.float()).to(x.dtype)
            out = linear(out, up)
        out = out.view(x.shape[0], 1, -1)
        if self.shared:
            act = self.shared_act or self.act
            hidden = act(shared_gate, shared_up)
            out = out + linear(hidden, shared_down if self.latent else shared_down[:D]).view(out.shape)
        extra = {"values": values, "picks": picks, "weights": weights}.get(self.also)
        return out if extra is None else (out, extra)


def operands(tokens: int = 3, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = [(tokens, D), (tokens, E), (E,), (E, 2 * INNER, D), (E, D, INNER), (D,), (OUT, D)]
    made = [torch.randn(*size) for size in (*sizes, (tokens, WIDE), (tokens, WIDE), (OUT, WIDE))]
    return [tensor if number in (1, 2) else tensor.to(dtype) for number, tensor in enumerate(made)]


class Step(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


@pytest.fixture
def trace(context: PassContext) -> Any:
    """The function as capture leaves it, canonicalized."""

    def capture(function: Any, *tensors: Tensor) -> CapturedProgram:
        program = capture_module(Step(function), tuple(tensor.clone() for tensor in tensors), {}, context.config)
        Canonicalize().apply(program, context)
        return program

    return capture


def raised(program: CapturedProgram, context: PassContext, **options: Any) -> PassResult:
    RaiseNorms().apply(program, context)
    return RaiseMoe(**options).apply(program, context)


FOUND = {
    "gathered": Block(),
    "exhaustive": Block(exhaustive),
    "swiglu": Block(act=swiglu),
    "bounded": Block(act=bounded),
    "groups": Block(groups=3),
    "no latent space": Block(latent=False),
    "no shared experts": Block(shared=False),
    "alone": Block(latent=False, shared=False),
    "no guard": Block(guard=0.0),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_found_and_computes_the_same(
    name: str, trace: Any, run: Any, count: Any, context: PassContext
) -> None:  # fmt: skip
    block, tensors = FOUND[name], operands()
    program = trace(block, *tensors)
    wanted, _ = run(program, *tensors)
    assert raised(program, context).statistics["fused"] == 1
    graph = program.graph_module.graph
    assert (count(graph, OPERATOR), count(graph, TOPK)) == (1, 0)
    node = next(node for node in graph.nodes if node.target is OPERATOR)
    given = [argument is not None for argument in node.args[5:]]
    assert given == [block.latent, block.latent, *[block.shared] * 3]
    assert node.kwargs["groups"] == block.groups and node.kwargs["scale"] == 1.5
    assert node.meta["selects"].startswith("topk")
    found, _ = run(program, *tensors)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("products", [gathered, grouped, exhaustive])
def test_in_bfloat16(products: Any, trace: Any, run: Any, context: PassContext) -> None:
    tensors = operands(5, torch.bfloat16)
    tensors[3:5] = [torch.randn(E, 16, D).bfloat16(), torch.randn(E, D, 8).bfloat16()]
    program = trace(Block(products, shared=False), *tensors)
    wanted, _ = run(program, *tensors)
    assert raised(program, context).statistics["fused"] == 1
    found, _ = run(program, *tensors)
    torch.testing.assert_close(found[0], wanted[0], rtol=3e-2, atol=6e-2)


def test_more_tokens_leave_what_follows_to_a_library(trace: Any, count: Any, context: PassContext) -> None:
    program = trace(Block(), *operands(9))
    result = raised(program, context)
    node = next(node for node in program.graph_module.graph.nodes if node.target is OPERATOR)
    assert node.args[5:] == (None,) * 5
    assert any(remark.kind == "note" and "stays apart: more tokens" in remark.message for remark in result.remarks)


def test_shared_experts_of_another_kind_stay(trace: Any, run: Any, context: PassContext) -> None:
    tensors = operands()
    program = trace(Block(shared_act=swiglu), *tensors)
    wanted, _ = run(program, *tensors)
    result = raised(program, context)
    node = next(node for node in program.graph_module.graph.nodes if node.target is OPERATOR)
    assert node.args[6] is not None and node.args[7:] == (None,) * 3
    assert any("the shared experts have another activation" in remark.message for remark in result.remarks)
    found, _ = run(program, *tensors)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[Any, str]] = {
    "scores": (Block(score=lambda logits: torch.softmax(logits, -1)), "scores are aten.softmax, not aten.sigmoid"),
    "biased": (Block(weigh_biased=True), "the experts' weights are not the scores without bias"),
    "guard": (Block(guard=0.5), "the sum of the experts' weights has a term that changes it"),
    "fill": (Block(groups=3, fill=0.0), "the experts of other groups are not masked with -inf"),
    "activation": (Block(act=lambda gate, up: torch.relu(gate) * up), "the activation is neither SwiGLU nor SiTU"),
    "halves": (Block(act=lambda gate, up: silu(up) * gate), "gate and up are not the halves of one product"),
    "values": (Block(also="values"), "the values of the top-k are used"),
    "picks": (Block(also="picks"), "is used elsewhere"),
    "weights": (Block(also="weights"), "uses, wanted one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_leaves_and_why(name: str, trace: Any, run: Any, count: Any, context: PassContext) -> None:
    block, reason = REFUSED[name]
    tensors = operands()
    program = trace(block, *tensors)
    wanted, _ = run(program, *tensors)
    result = raised(program, context)
    assert result.statistics["fused"] == 0 and count(program.graph_module.graph, TOPK) >= 1
    missed = [remark for remark in result.remarks if remark.kind == "missed"]
    assert any(reason in remark.message and remark.remedy for remark in missed), [r.message for r in missed]
    found, _ = run(program, *tensors)
    assert all(map(torch.equal, found, wanted))


def test_half_precision_logits_are_refused(trace: Any, context: PassContext) -> None:
    tensors = operands(3, torch.bfloat16)
    tensors[1:3] = [tensors[1].bfloat16(), tensors[2].bfloat16()]
    program = trace(replace(Block(), shared=False), *tensors)
    result = raised(program, context)
    assert any("the router's logits is bfloat16, wanted float32" in remark.message for remark in result.remarks)


def test_a_write_in_between_is_refused(trace: Any, context: PassContext) -> None:
    def block(x: Tensor, *rest: Tensor) -> Any:
        scores = torch.sigmoid(rest[0])
        picks = torch.topk(scores + rest[1], K, dim=-1).indices
        weights = scores.gather(-1, picks)
        outputs = gathered(x, picks, rest[2], rest[3], situ)
        rest[0].zero_()
        return (outputs * weights.unsqueeze(-1)).sum(1)

    result = raised(trace(block, *operands()), context)
    assert any("is written between its use and" in remark.message for remark in result.remarks)
