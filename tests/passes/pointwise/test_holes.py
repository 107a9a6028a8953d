"""What large operators take in: the product behind a gate's logits, the sum behind routed experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from kimigraph.ir.launches import graph_launches
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.ir.schemas import argument
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.fuse_pointwise import FusePointwise

B, H, K, V, R, W = 2, 2, 8, 12, 4, 4
KDA, MOE = torch.ops.kimigraph.kda_decode.default, torch.ops.kimigraph.moe_experts.default
Step = Callable[..., Any]


def kda_operands(batch: int = B, rank: int = R) -> list[Tensor]:
    channels = H * (2 * K + V)
    low, weight = torch.randn(batch, 1, rank), torch.randn(H * K, rank) * rank**-0.5
    shapes = [(batch, 1, channels), (channels, W), (batch, channels, W - 1), (H * K,), (H,), (batch, 1, H)]
    return [low, weight, *(torch.randn(shape) for shape in shapes), torch.randn(batch, H, V, K)]


def kda(logits: Callable[[Tensor, Tensor], Any]) -> Step:
    """A step whose gate's logits are what ``logits`` makes of a few numbers a token."""

    def step(low: Tensor, weight: Tensor, qkv: Tensor, taps: Tensor, conv: Tensor, *rest: Tensor) -> Any:
        bias, rate, beta, state = rest
        gate, *others = logits(low, weight)
        out = KDA(qkv, taps, conv, gate, bias, rate, beta, state, None, None, scale=0.3, state_layout="vk")
        return out, *others

    return step


def moe_operands(tokens: int = 3) -> list[Tensor]:
    width, experts, inner = 6, 5, 4
    shapes = [(tokens, width), (tokens, experts), (experts, 2 * inner, width), (experts, width, inner), (tokens, width)]
    return [torch.randn(shape) for shape in shapes]


def moe(behind: Callable[[Tensor, Tensor, Tensor], Any]) -> Step:
    """A block of experts with what ``behind`` makes of its result, its choice and a residual."""

    def step(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor) -> Any:
        out, chosen = MOE(x, logits, None, gate_up, down, picks=2, renormalize=True)
        return behind(out, chosen, residual)

    return step


def fused(
    trace: Any, run: Any, context: PassContext, function: Step, operands: list[Tensor]
) -> tuple[CapturedProgram, PassResult]:
    """The program after the pass, which must leave results and states as they are, to rounding."""
    program = trace(function, *operands)
    [record] = run_pipeline(program, Pipeline((FusePointwise(lone=False),)), context)
    eager = [tensor.clone() for tensor in operands]
    results = function(*eager)
    wanted = [*(results if isinstance(results, tuple) else (results,)), *eager]
    found = run(program, *operands)
    for new, old in zip([*found[0], *found[1]], wanted, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)
    return program, record.result


def operator_in(program: CapturedProgram, target: Any) -> Node:
    return next(node for node in program.graph_module.graph.nodes if node.target is target)


GATES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "as it is": lambda low, weight: (F.linear(low, weight),),
    "by head": lambda low, weight: (F.linear(low, weight).view(-1, 1, H, K),),
    "of flat rows": lambda low, weight: (F.linear(low.view(-1, low.shape[-1]), weight).unsqueeze(1),),
}


@pytest.mark.parametrize("name", GATES)
def test_a_gate_of_low_rank_becomes_an_operand(name: str, trace: Any, run: Any, context: PassContext) -> None:
    program, result = fused(trace, run, context, kda(GATES[name]), kda_operands())
    node = operator_in(program, KDA)
    assert graph_launches(program.graph_module.graph) == 1
    assert tuple(argument(node, "gate").meta["val"].shape) == (B, 1, R)
    assert tuple(argument(node, "gate_weight").meta["val"].shape) == (H * K, R)
    assert "mm" in node.meta["replaces"]
    [remark] = result.remarks
    assert remark.kind == "passed" and "mm became part of kda_decode" in remark.message
    assert "us apart" in remark.message and result.statistics["launches saved"] == 1


REFUSED_GATES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "used elsewhere": (lambda low, weight: ((gate := F.linear(low, weight)), gate.exp()), "is used elsewhere"),
    "heads across": (
        lambda low, weight: (F.linear(low, weight).view(-1, 1, K, H).transpose(2, 3),),
        "another order than the product gives",
    ),
}


@pytest.mark.parametrize("name", REFUSED_GATES)
def test_a_gate_that_stays_says_why(name: str, trace: Any, run: Any, context: PassContext) -> None:
    gate, reason = REFUSED_GATES[name]
    program, result = fused(trace, run, context, kda(gate), kda_operands())
    assert argument(operator_in(program, KDA), "gate_weight") is None
    [remark] = [remark for remark in result.remarks if remark.kind == "missed"]
    assert reason in remark.message and remark.remedy


def test_a_deep_gate_stays(trace: Any, run: Any, context: PassContext) -> None:
    program, result = fused(trace, run, context, kda(GATES["as it is"]), kda_operands(rank=300))
    assert argument(operator_in(program, KDA), "gate_weight") is None
    assert any("deeper than 256" in remark.message for remark in result.remarks)


def test_many_sequences_that_would_read_the_weight_anew_stay(trace: Any, context: PassContext) -> None:
    """The same layer of one sequence and of many: what a launch costs is bytes of so many copies of the weight."""
    heads, side, rank, found = 32, 128, 128, dict[int, bool]()
    for batch in (1, 8, 64):
        shapes = {"qkv": (batch, 1, 3 * heads * side), "conv": (batch, 3 * heads * side, 3)}
        with torch.device("meta"):
            low, weight = torch.empty(batch, 1, rank).bfloat16(), torch.empty(heads * side, rank).bfloat16()
            rest = torch.empty(heads * side), torch.empty(heads), torch.empty(batch, 1, heads).bfloat16()
            state, taps = torch.empty(batch, heads, side, side), torch.empty(3 * heads * side, 4)
            qkv, conv = torch.empty(shapes["qkv"]).bfloat16(), torch.empty(shapes["conv"]).bfloat16()
        program = trace(kda(GATES["as it is"]), low, weight, qkv, taps, conv, *rest, state)
        [record] = run_pipeline(program, Pipeline((FusePointwise(lone=False),)), context)
        found[batch] = argument(operator_in(program, KDA), "gate_weight") is not None
        if not found[batch]:
            assert any("does not pay" in remark.message for remark in record.result.remarks)
    assert found == {1: True, 8: True, 64: False}


def test_rows_that_are_written_in_between_stay(trace: Any, run: Any, context: PassContext) -> None:
    def gate(low: Tensor, weight: Tensor) -> Any:
        logits = F.linear(low, weight)
        low.mul_(2)
        return logits, low.exp()

    program, result = fused(trace, run, context, kda(gate), kda_operands())
    assert argument(operator_in(program, KDA), "gate_weight") is None
    assert any("is written between its use and" in remark.message for remark in result.remarks)


SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "behind": lambda out, chosen, residual: out + residual,
    "before": lambda out, chosen, residual: residual + out,
    "by sequence": lambda out, chosen, residual: (out.view(-1, 1, 6) + residual.view(-1, 1, 6)).view(-1, 6) * 1,
    "computed late": lambda out, chosen, residual: out + residual.matmul(residual.t()).matmul(residual),
    "with the choice": lambda out, chosen, residual: (out + residual, chosen.long()),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_behind_experts_becomes_an_operand(name: str, trace: Any, run: Any, context: PassContext) -> None:
    program, result = fused(trace, run, context, moe(SUMS[name]), moe_operands())
    node = operator_in(program, MOE)
    assert argument(node, "residual") is not None and "add" in node.meta["replaces"]
    assert not any(str(other.target) == "aten.add.Tensor" for other in program.graph_module.graph.nodes)
    assert any("add became part of moe_experts" in remark.message for remark in result.remarks)


def choice_before(out: Tensor, chosen: Tensor, residual: Tensor) -> Any:
    counted = chosen.sum()
    return out + residual * counted, counted


REFUSED_SUMS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], str]] = {
    "used elsewhere": (lambda out, chosen, residual: (out + residual, out.exp()), ""),
    "broadcast": (lambda out, chosen, residual: out + residual[:1], "another shape or type"),
    "scaled": (lambda out, chosen, residual: torch.add(out, residual, alpha=2), ""),
    "turned": (lambda out, chosen, residual: out.t() + residual.t(), "another order"),
    "a choice that the sum needs": (choice_before, "reads the experts' choice before the sum"),
    "with itself": (lambda out, chosen, residual: out + out, ""),
}


@pytest.mark.parametrize("name", REFUSED_SUMS)
def test_a_sum_that_stays(name: str, trace: Any, run: Any, context: PassContext) -> None:
    behind, reason = REFUSED_SUMS[name]
    program, result = fused(trace, run, context, moe(behind), moe_operands())
    assert argument(operator_in(program, MOE), "residual") is None
    missed = [remark for remark in result.remarks if remark.kind == "missed"]
    assert not reason or any(reason in remark.message and remark.remedy for remark in missed)


def test_operands_that_are_written_before_the_sum_stay(trace: Any, run: Any, context: PassContext) -> None:
    def step(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor) -> Tensor:
        out, _ = MOE(x, logits, None, gate_up, down, picks=2, renormalize=True)
        x.mul_(2)
        return out + residual

    program, _ = fused(trace, run, context, step, moe_operands())
    assert argument(operator_in(program, MOE), "residual") is None


def test_without_products_nothing_is_taken_in(trace: Any, context: PassContext) -> None:
    program = trace(moe(SUMS["behind"]), *moe_operands())
    run_pipeline(program, Pipeline((FusePointwise(products=False),)), context)
    assert argument(operator_in(program, MOE), "residual") is None
