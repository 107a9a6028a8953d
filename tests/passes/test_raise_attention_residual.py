"""``raise-attention-residual``: every spelling is one operator, near misses say why, two phases equal one pass."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from kimigraph.capture import capture_module
from kimigraph.ir.errors import UsageError
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.passes import PassContext, Pipeline
from kimigraph.passes.algebra import residual_phases
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.passes.raise_attention_residual import RaiseAttentionResidual

ATEN = torch.ops.aten
EPS, OUT_EPS = 1e-5, 1e-6
GONE = {ATEN.softmax.int, ATEN._softmax.default, ATEN.stack.default, ATEN.cat.default, ATEN.rsqrt.default}


@dataclass(frozen=True)
class Spelling:
    """How a model writes one residual."""

    sources: int = 3
    shape: tuple[int, ...] = (2, 5)
    width: int = 12
    stack_dim: int = 0
    stacked_by: str = "stack"
    logits: str = "product"
    root: str = "rsqrt"
    mixed_by: str = "sum"
    norm: str = "behind"
    flat: bool = False
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        plain = Spelling()
        return ",".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(plain, k)) or "plain"


def stacked(spelling: Spelling, sources: tuple[Tensor, ...]) -> Tensor:
    if spelling.stacked_by == "stack":
        return torch.stack(sources, spelling.stack_dim)
    return torch.cat([source.unsqueeze(spelling.stack_dim) for source in sources], spelling.stack_dim)


def over_root(spelling: Spelling, x: Tensor, of: Tensor, eps: float, keep: bool = True) -> Tensor:
    square = of.square() if spelling.root == "rsqrt" else of * of
    total = square.mean(-1, keepdim=keep) + eps
    return x * torch.rsqrt(total) if spelling.root == "rsqrt" else x / total.sqrt()


def logits_of(spelling: Spelling, values: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    if spelling.logits == "product":
        return over_root(spelling, (values * (query * weight)).sum(-1), values, EPS, keep=False)
    if spelling.logits == "alone":
        return over_root(spelling, (query * values).sum(-1), values, EPS, keep=False)
    if spelling.logits == "normalised first":
        return (query * (weight * over_root(spelling, values, values, EPS))).sum(-1)
    normed = over_root(spelling, values, values, EPS) * weight
    if spelling.logits == "linear":
        return F.linear(normed, query.unsqueeze(0)).squeeze(-1)
    assert spelling.logits == "matmul"
    return normed @ query


def mixed(spelling: Spelling, weights: Tensor, values: Tensor) -> Tensor:
    dim = spelling.stack_dim
    if spelling.mixed_by == "sum":
        return (values * weights.unsqueeze(-1)).sum(dim)
    rows, columns = weights.movedim(dim, -1).unsqueeze(-2), values.movedim(dim, -2)
    return (rows @ columns).squeeze(-2)


def residual(spelling: Spelling) -> Callable[..., Tensor]:
    """The residual of its sources, query and weights, as the model spells it; a product stands before and behind."""

    def run(query: Tensor, weight: Tensor, out_weight: Tensor, *given: Tensor) -> Tensor:
        sources = tuple(source * 2 for source in given)
        values = stacked(spelling, sources).float()
        if spelling.flat:
            values = values.view(spelling.sources, -1, spelling.width)
        weights = torch.softmax(logits_of(spelling, values, query.float(), weight.float()), dim=spelling.stack_dim)
        out = mixed(spelling, weights, values).to(spelling.dtype)
        if spelling.norm == "behind":
            out = (over_root(spelling, out.float(), out.float(), OUT_EPS) * out_weight.float()).to(spelling.dtype)
        elif spelling.norm == "and more":
            out = over_root(spelling, out, out, OUT_EPS) * out_weight + out
        return out.cos()

    return run


class Step(nn.Module):
    """A function as a module, for capture."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Any:
        return self.function(*given)


def tensors(spelling: Spelling) -> list[Tensor]:
    width = spelling.width
    sources = [torch.randn(*spelling.shape, width).to(spelling.dtype) for _ in range(spelling.sources)]
    return [torch.randn(width), torch.randn(width), torch.randn(width), *sources]


def captured(function: Callable[..., Any], given: list[Tensor], context: PassContext) -> CapturedProgram:
    program = capture_module(Step(function), tuple(x.clone() for x in given), {}, context.config)
    Canonicalize().apply(program, context)
    return program


def raised(program: CapturedProgram, name: str = "attention_residual") -> list[Node]:
    return [node for node in program.graph_module.graph.nodes if node.target is OPERATORS[name].overload]


def targets(program: CapturedProgram) -> set[Any]:
    return {node.target for node in program.graph_module.graph.nodes if node.op == "call_function"}


PLAIN = Spelling()


@pytest.mark.parametrize(
    "spelling",
    [
        PLAIN,
        replace(PLAIN, sources=2),
        replace(PLAIN, sources=9, width=33),
        replace(PLAIN, shape=(1, 1)),
        replace(PLAIN, shape=(3, 3), sources=3),
        replace(PLAIN, shape=(7,)),
        replace(PLAIN, width=3),
        replace(PLAIN, stacked_by="cat"),
        replace(PLAIN, stack_dim=2),
        replace(PLAIN, stack_dim=1),
        replace(PLAIN, stack_dim=2, mixed_by="matmul"),
        replace(PLAIN, logits="alone"),
        replace(PLAIN, logits="normalised first"),
        replace(PLAIN, logits="linear"),
        replace(PLAIN, logits="matmul"),
        replace(PLAIN, root="sqrt"),
        replace(PLAIN, norm="none"),
        replace(PLAIN, norm="and more"),
        replace(PLAIN, flat=True),
        replace(PLAIN, dtype=torch.bfloat16),
        replace(PLAIN, dtype=torch.bfloat16, norm="none"),
    ],
    ids=str,
)
def test_every_spelling_is_one_operator(spelling: Spelling, run: Callable[..., Any], context: PassContext) -> None:
    given = tensors(spelling)
    program = captured(residual(spelling), given, context)
    expected = run(program, *given)
    result = RaiseAttentionResidual().apply(program, context)
    (node,) = raised(program)
    assert result.statistics["fused"] == 1
    sources, query, weight, out_weight = node.args
    assert isinstance(sources, list | tuple) and len(sources) == spelling.sources
    assert isinstance(query, Node) and query.op == "placeholder"
    assert (weight is None) == (spelling.logits == "alone")
    assert (out_weight is not None) == (spelling.norm == "behind")
    assert node.kwargs["eps"] == EPS and (out_weight is None or node.kwargs["out_eps"] == OUT_EPS)
    left = GONE - ({ATEN.rsqrt.default} if spelling.norm == "and more" else set())
    assert not targets(program) & left
    tolerance = 1e-5 if spelling.dtype is torch.float32 else 2e-2
    for old, new in zip(expected[0], run(program, *given)[0], strict=True):
        assert old.dtype == new.dtype and old.shape == new.shape
        torch.testing.assert_close(new, old, rtol=tolerance, atol=tolerance)


def normalised_values(query: Tensor, weight: Tensor, out_weight: Tensor, *given: Tensor) -> Tensor:
    values = torch.stack(given)
    normed = over_root(PLAIN, values, values, EPS) * weight
    return (torch.softmax((normed * query).sum(-1), 0).unsqueeze(-1) * normed).sum(0) * out_weight


def other_values(query: Tensor, weight: Tensor, out_weight: Tensor, *given: Tensor) -> Tensor:
    logits = logits_of(PLAIN, torch.stack([source + 1 for source in given]), query, weight)
    return (torch.softmax(logits, 0).unsqueeze(-1) * torch.stack(given)).sum(0) * out_weight


def weights_returned(query: Tensor, weight: Tensor, out_weight: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.stack(given)
    weights = torch.softmax(logits_of(PLAIN, values, query, weight), 0)
    return (weights.unsqueeze(-1) * values).sum(0) * out_weight, weights.cos()


def largest(query: Tensor, weight: Tensor, out_weight: Tensor, *given: Tensor) -> Tensor:
    values = torch.stack(given)
    weights = torch.softmax(logits_of(PLAIN, values, query, weight), 0)
    return (weights.unsqueeze(-1) * values).amax(0) * out_weight


def layer_norm(query: Tensor, weight: Tensor, out_weight: Tensor, *given: Tensor) -> Tensor:
    values = torch.stack(given)
    centred = values - values.mean(-1, keepdim=True)
    logits = (values * (query * weight)).sum(-1) * torch.rsqrt(centred.square().mean(-1) + EPS)
    return (torch.softmax(logits, 0).unsqueeze(-1) * values).sum(0) * out_weight


def token_softmax(query: Tensor, weight: Tensor, out_weight: Tensor, *given: Tensor) -> Tensor:
    values = torch.stack([source.transpose(0, 1).contiguous() for source in given])
    weights = torch.softmax(logits_of(PLAIN, values, query, weight), 0)
    return (weights.transpose(1, 2).unsqueeze(-1) * values).sum(0) * out_weight


def sliced(query: Tensor, weight: Tensor, out_weight: Tensor, *given: Tensor) -> Tensor:
    values = torch.stack([source[:, ::2] for source in given])
    weights = torch.softmax(logits_of(PLAIN, values, query, weight), 0)
    return (weights.unsqueeze(-1) * values).sum(0) * out_weight


@pytest.mark.parametrize(
    ("function", "shape", "sources", "reason"),
    [
        (normalised_values, (2, 5), 3, "the mixture: expected"),
        (other_values, (2, 5), 3, "the logits: expected the same 'values' as before"),
        (weights_returned, (2, 5), 3, "is used elsewhere, by cos"),
        (largest, (2, 5), 3, "the mixture is no sum of weighted sources"),
        (layer_norm, (2, 5), 3, "the logits: "),
        (token_softmax, (4, 4), 3, "the mixture's weights has layout"),
        (sliced, (2, 6), 3, "wanted a contiguous tensor"),
        (residual(replace(PLAIN, sources=10)), (2, 5), 10, "10 sources are stacked, at most 9"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_near_misses_are_refused_with_reason_and_remedy(
    function: Callable[..., Any], shape: tuple[int, ...], sources: int, reason: str, context: PassContext
) -> None:
    program = captured(function, tensors(replace(PLAIN, shape=shape, sources=sources)), context)
    before = str(program.graph_module.graph)
    result = RaiseAttentionResidual().apply(program, context)
    assert not result.modified and str(program.graph_module.graph) == before
    (remark,) = result.remarks
    assert remark.kind == "missed" and reason in remark.message and remark.remedy


def test_a_source_written_behind_the_mixture_is_read_before(run: Callable[..., Any], context: PassContext) -> None:
    def step(query: Tensor, weight: Tensor, out_weight: Tensor, first: Tensor, second: Tensor) -> Tensor:
        values = torch.stack([first, second])
        weights = torch.softmax(logits_of(PLAIN, values, query, weight), 0)
        first.copy_(second + 1)
        return (weights.unsqueeze(-1) * values).sum(0) * out_weight

    given = tensors(replace(PLAIN, sources=2))
    program = captured(step, given, context)
    result = RaiseAttentionResidual().apply(program, context)
    assert not raised(program)
    assert "is written between its use and" in result.remarks[0].message


def sublayers(count: int, blocks: int, width: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """``count`` residuals over the same ``blocks``, each with a running sum that the one before it advances."""

    def run(*given: Tensor) -> Tensor:
        finished, partial = given[:blocks], given[blocks]
        for number in range(count):
            query, weight, out_weight = given[blocks + 1 + 3 * number : blocks + 4 + 3 * number]
            values = torch.stack([*finished, partial])
            weights = torch.softmax(logits_of(PLAIN, values, query.squeeze(0), weight), 0)
            mixture = (weights.unsqueeze(-1) * values).sum(0)
            partial = partial + torch.tanh(over_root(PLAIN, mixture, mixture, OUT_EPS) * out_weight)
        return partial

    given = [torch.randn(2, 3, width) for _ in range(blocks + 1)]
    for _ in range(count):
        given += [torch.randn(1, width), torch.randn(width), torch.randn(width)]
    return run, given


@pytest.mark.parametrize(("count", "histories"), [(2, 1), (8, 1), (9, 2)])
def test_two_phases_equal_one_pass(count: int, histories: int, run: Callable[..., Any], context: PassContext) -> None:
    function, given = sublayers(count, 3, 20)
    program = captured(function, given, context)
    expected = run(program, *given)
    split = program.copy()
    result = RaiseAttentionResidual(phases="two").apply(split, context)
    assert len(raised(split, "attention_residual_history")) == histories
    merges = raised(split, "attention_residual_merge")
    assert len(merges) == count and not raised(split)
    passed = [remark for remark in result.remarks if remark.kind == "passed"]
    assert [remark.node for remark in passed] == [node.name for node in merges]
    assert all(node.meta["replaces"] for node in merges)
    torch.testing.assert_close(run(split, *given)[0], expected[0], rtol=2e-5, atol=2e-5)
    RaiseAttentionResidual(phases="one").apply(program, context)
    assert len(raised(program)) == count
    torch.testing.assert_close(run(program, *given)[0], expected[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("tokens", "blocks", "chosen"), [(1, 8, False), (64, 2, False), (64, 8, True), (512, 8, True)])
def test_bytes_and_launches_choose_the_phases(
    tokens: int, blocks: int, chosen: bool, context: PassContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token a row is all launches; with many blocks the merge reads a quarter of what one pass reads."""
    monkeypatch.setattr(residual_phases, "WORTH", 1.0)
    result = phases_at_width(tokens, blocks, context)
    (note,) = [remark for remark in result.remarks if remark.kind == "note"]
    assert ("in two phases" in note.message) == chosen
    assert "us on NVIDIA H200" in note.message


def test_a_small_gain_is_not_worth_two_phases(context: PassContext) -> None:
    result = phases_at_width(64, 8, context)
    (note,) = [remark for remark in result.remarks if remark.kind == "note"]
    assert "in one pass each" in note.message and result.statistics["merges"] == 0


def phases_at_width(tokens: int, blocks: int, context: PassContext) -> PassResult:
    """The pass over eight sublayers of width 7168 in bf16, without a tensor of that size."""
    with torch.device("meta"):
        function, given = sublayers(8, blocks, 7168)
        given = [x.new_empty(1, tokens, 7168) if x.dim() == 3 else x for x in given]
    program = captured(function, [torch.empty_like(x, device="cpu", dtype=torch.bfloat16) for x in given], context)
    return RaiseAttentionResidual().apply(program, context)


def test_the_option_parses_and_refuses_other_words(context: PassContext) -> None:
    pipeline = Pipeline.parse("raise-attention-residual{phases=two}")
    assert pipeline == Pipeline((RaiseAttentionResidual(phases="two"),))
    assert Pipeline.parse(str(pipeline)) == pipeline
    function, given = sublayers(2, 1, 8)
    program = captured(function, given, context)
    with pytest.raises(UsageError, match="one of auto, one, two, not 'three'"):
        RaiseAttentionResidual(phases="three").apply(program, context)
