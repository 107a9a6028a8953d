"""Rotations as they are spelled, and what only looks like one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.ir.reference.key_preparation import rotated
from kimigraph.passes.algebra.rotation import Rotation, rotation_of

HALF = 4


def beside(*parts: Tensor) -> Tensor:
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def pairs(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return first * cos - second * sin, second * cos + first * sin


def half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., : 2 * HALF].chunk(2, dim=-1)
    turned = torch.cat(pairs(first, second, cos, sin), -1)
    return beside(turned, x[..., 2 * HALF :]) if x.shape[-1] > 2 * HALF else turned


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = x[..., : 2 * HALF].float()
    both = torch.stack(pairs(turned[..., 0::2], turned[..., 1::2], cos, sin), dim=-1).flatten(-2)
    return beside(both.to(x.dtype), x[..., 2 * HALF :]) if x.shape[-1] > 2 * HALF else both.to(x.dtype)


def deinterleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, *rest = x.unsqueeze(2).split(2 * HALF, -1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat([*pairs(turned[..., ::2], turned[..., 1::2], cos, sin), *rest], -1).squeeze(2)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, *rest = x.split(2 * HALF, -1)
    angle = torch.atan2(sin, cos)
    wide = torch.cat([angle, angle], -1)
    swapped = torch.cat([-turned[..., HALF:], turned[..., :HALF]], -1)
    return beside(turned * (wide.cos() * 1.0) + swapped * wide.sin(), *rest)


SPELLINGS = {
    half_split: "half_split", interleaved: "interleaved", deinterleaved: "deinterleaved", rotate_half: "half_split",
}  # fmt: skip


def found_in(function: Callable[..., Tensor], width: int = 11) -> Rotation | None:
    angle = torch.rand(1, 3, HALF)
    graph = make_fx(function, tracing_mode="fake")(torch.randn(2, 3, width), angle.cos(), angle.sin()).graph
    output = graph.output_node().args[0]
    assert isinstance(output, Node)
    return rotation_of(output)


@pytest.mark.parametrize("function", SPELLINGS)
@pytest.mark.parametrize("width", [11, 2 * HALF])
def test_spellings(function: Callable[..., Tensor], width: int) -> None:
    found = found_in(function, width)
    assert found is not None and found.style == SPELLINGS[function]
    assert found.x.meta["val"].shape[-1] == width and found.cos.node is not found.sin.node
    assert found.cos.halved == (function is rotate_half)
    x, angle = torch.randn(2, 3, width), torch.rand(1, 3, HALF)
    wanted = function(x, angle.cos(), angle.sin())
    torch.testing.assert_close(rotated(x, angle.cos(), angle.sin(), found.style), wanted)


def swapped(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., : 2 * HALF].chunk(2, dim=-1)
    return torch.cat([*pairs(second, first, cos, sin), x[..., 2 * HALF :]], -1)


def backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., : 2 * HALF].chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin, x[..., 2 * HALF :]], -1)


def other_sine(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., : 2 * HALF].chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * cos, x[..., 2 * HALF :]], -1)


def last_columns(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x[..., -2 * HALF :].chunk(2, dim=-1)
    return torch.cat([x[..., : -2 * HALF], *pairs(first, second, cos, sin)], -1)


def unequal_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x[..., : 2 * HALF], x[..., 2 * HALF :]
    other = torch.cat([-turned[..., HALF:], turned[..., :HALF]], -1)
    return torch.cat([turned * torch.cat([cos, sin], -1) + other * torch.cat([sin, sin], -1), rest], -1)


def halves_the_wrong_way(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x[..., : 2 * HALF], x[..., 2 * HALF :]
    other = torch.cat([turned[..., HALF:], -turned[..., :HALF]], -1)
    return torch.cat([turned * torch.cat([cos, cos], -1) + other * torch.cat([sin, sin], -1), rest], -1)


@pytest.mark.parametrize(
    "function", [swapped, backwards, other_sine, last_columns, unequal_halves, halves_the_wrong_way]
)
def test_what_is_another_function(function: Callable[..., Tensor]) -> None:
    assert found_in(function) is None


@pytest.mark.parametrize("function", [half_split, interleaved, deinterleaved], ids=lambda function: function.__name__)
def test_one_angle_for_all_pairs_is_none_a_pair(function: Callable[..., Tensor]) -> None:
    """An operator that reads an angle a pair would read past the only one."""
    assert found_in(lambda x, cos, sin: function(x, cos[..., :1], sin[..., :1])) is None
