"""Attention residuals: the references against the model's own function, and what shapes are refused."""

import pytest
import torch
from torch import Tensor, nn

from kimigraph.ir.operators import OPERATORS
from kimigraph.models.kimi_k31.attention_residual import attention_residual as modelled
from kimigraph.models.kimi_k31.normalization import RMSNorm

ONE = OPERATORS["attention_residual"].overload
HISTORY = OPERATORS["attention_residual_history"].overload
MERGE = OPERATORS["attention_residual_merge"].overload
EPS, OUT_EPS = 1e-5, 1e-6


def operands(sources: int, dtype: torch.dtype = torch.float32, width: int = 24) -> tuple[list[Tensor], Tensor, Tensor]:
    values = [(torch.randn(2, 3, width) * (1 + number)).to(dtype) for number in range(sources)]
    return values, torch.randn(1, width), 1 + 0.1 * torch.randn(width)


@pytest.mark.parametrize("sources", [2, 5, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_what_the_model_computes(sources: int, dtype: torch.dtype) -> None:
    values, query, weight = operands(sources, dtype)
    norm, projection = RMSNorm(24, EPS, torch.float32), nn.Linear(24, 1, bias=False)
    norm.weight.data, projection.weight.data = weight, query
    found = ONE(values, query, weight, eps=EPS)
    assert found.dtype == dtype
    torch.testing.assert_close(found, modelled(values, norm, projection), rtol=1e-5, atol=1e-5)


def test_the_norm_behind_and_one_source() -> None:
    values, query, weight = operands(3)
    out_weight = torch.randn(24)
    mixed = ONE(values, query, weight, eps=EPS)
    wanted = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + OUT_EPS) * out_weight
    torch.testing.assert_close(ONE(values, query, weight, out_weight, eps=EPS, out_eps=OUT_EPS), wanted)
    torch.testing.assert_close(ONE(values[:1], query, weight, eps=EPS), values[0])


def test_weights_follow_the_normalised_sources_not_their_size() -> None:
    """A source ten times as large has the same logit: only the value that is summed is larger."""
    values, query, weight = operands(2)
    _, lse = HISTORY(values, [query], [weight], eps=0.0)
    _, scaled = HISTORY([10 * value for value in values], [query], [weight], eps=0.0)
    torch.testing.assert_close(lse, scaled)


@pytest.mark.parametrize("blocks", [1, 4, 8])
@pytest.mark.parametrize("normed", [True, False])
def test_two_phases_equal_one_pass(blocks: int, normed: bool) -> None:
    values, query, weight = operands(blocks + 1)
    out_weight = torch.randn(24)
    queries = [query, query * 3]
    mixture, lse = HISTORY(values[:-1], queries, [weight, weight] if normed else [], eps=EPS)
    assert mixture.shape == (2, 2, 3, 24) and lse.shape == (2, 2, 3)
    norm = weight if normed else None
    for number, each in enumerate(queries):
        found = MERGE(mixture[number], lse[number], values[-1], each, norm, out_weight, eps=EPS)
        torch.testing.assert_close(found, ONE(values, each, norm, out_weight, eps=EPS), rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_fit_are_named() -> None:
    sources, query, weight = operands(2)
    fake = {name: OPERATORS[name].fake for name in OPERATORS}
    one, history, merge = (fake[f"attention_residual{suffix}"] for suffix in ("", "_history", "_merge"))
    with pytest.raises(ValueError, match=r"no sources"):
        one([], query, weight, eps=EPS)
    with pytest.raises(
        ValueError, match=r"sources\[1\] is torch.float32 \[2, 3, 23\], want torch.float32 \[2, 3, 24\]"
    ):
        one([sources[0], sources[1][..., 1:]], query, weight, eps=EPS)
    with pytest.raises(ValueError, match=r"norm_weight is \[23\], want \[24\]"):
        one(sources, query, weight[1:], eps=EPS)
    with pytest.raises(ValueError, match=r"2 queries and 1 norm weights"):
        history(sources, [query, query], [weight], eps=EPS)
    with pytest.raises(ValueError, match=r"lse \[2, 3, 24\], partial"):
        merge(sources[0], sources[0], sources[1], query, eps=EPS)


def test_costs_count_every_operand_once() -> None:
    values, query, weight = operands(3)
    size = 4 * values[0].numel()
    assert OPERATORS["attention_residual"].cost(values, query, weight).bytes == 4 * size + 2 * 96
    history = OPERATORS["attention_residual_history"].cost(values, [query] * 5, [weight] * 5)
    assert history.bytes == 3 * size + 10 * 96 + 5 * (size + size // 24)
