"""Known calls: what is recognised as one, and what is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kimigraph
from kimigraph.adapters import tensor_guard as guards
from kimigraph.ir.config import CompileConfig
from kimigraph.runtime import dispatch

REFERENCE = CompileConfig(target="cpu:reference", cache="off", report=False)


class Scaled(nn.Module):
    """Adds the scaled input to a cache; the weight is one of a concatenation, so that it is prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.5), requires_grad=False)

    def forward(self, x: Tensor, cache: dict[str, Tensor], scale: float = 2.0, flags: Any = (True, None)) -> Any:
        y = x @ self.weight * scale
        cache["cache.0.sum"].add_(y.sum(0))
        return {"y": y, "more": [y.relu(), flags[0]]}


def caches() -> dict[str, Tensor]:
    return {"cache.0.sum": torch.zeros(4)}


@pytest.fixture
def compiled() -> kimigraph.Compiled:
    return kimigraph.optimize(Scaled(), (torch.ones(2, 4), caches()), REFERENCE)


def known(compiled: kimigraph.Compiled, *args: Any, **kwargs: Any) -> bool:
    return any(call.arguments(args, kwargs) is not None for call, _, _ in compiled.known_calls)


def test_a_call_that_looks_like_an_earlier_one_is_known(compiled: kimigraph.Compiled) -> None:
    first = compiled(torch.ones(2, 4), caches())
    assert known(compiled, torch.randn(2, 4), caches())
    x, cache = torch.randn(2, 4), caches()
    again = compiled(x, cache)
    expected_cache = caches()
    expected = Scaled()(x, expected_cache)
    torch.testing.assert_close(again["y"], expected["y"])
    torch.testing.assert_close(cache, expected_cache)
    assert type(again) is type(first) and again["more"][1] is True


UNLIKE: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "shape": lambda: ((torch.ones(3, 4), caches()), {}),
    "strides": lambda: ((torch.ones(4, 2).T, caches()), {}),
    "dtype": lambda: ((torch.ones(2, 4, dtype=torch.float64), caches()), {}),
    "device": lambda: ((torch.ones(2, 4, device="meta"), caches()), {}),
    "no tensor": lambda: ((1.0, caches()), {}),
    "another key": lambda: ((torch.ones(2, 4), {"cache.1.sum": torch.zeros(4)}), {}),
    "one more key": lambda: ((torch.ones(2, 4), {**caches(), "a": torch.zeros(4)}), {}),
    "another container": lambda: ((torch.ones(2, 4), list(caches().values())), {}),
    "a keyword": lambda: ((torch.ones(2, 4),), {"cache": caches()}),
    "another value": lambda: ((torch.ones(2, 4), caches(), 3.0), {}),
    "an argument more": lambda: ((torch.ones(2, 4), caches(), 2.0), {}),
    "an argument less": lambda: ((torch.ones(2, 4),), {}),
    "a shape of the cache": lambda: ((torch.ones(2, 4), {"cache.0.sum": torch.zeros(2, 4)}), {}),
}


@pytest.mark.parametrize("what", UNLIKE)
@pytest.mark.parametrize("private", [True, False])
def test_a_call_that_differs_is_not_known(
    compiled: kimigraph.Compiled, what: str, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not private:
        monkeypatch.setattr(dispatch, "tensor_guard", guards._comparison)
    compiled(torch.ones(2, 4), caches())
    assert known(compiled, torch.ones(2, 4), caches())
    args, kwargs = UNLIKE[what]()
    assert not known(compiled, *args, **kwargs)


def test_plain_values_are_compared_by_their_bits(compiled: kimigraph.Compiled) -> None:
    args = torch.ones(2, 4), caches()
    compiled(*args, 0.0)
    assert known(compiled, *args, 0.0)
    assert not known(compiled, *args, -0.0)
    assert not known(compiled, *args, 0)
    compiled(*args, 1.0, (1, None))
    assert not known(compiled, *args, 1.0, (True, None))


def test_a_tensor_that_changed_its_shape_in_place_is_another_call(compiled: kimigraph.Compiled) -> None:
    x = torch.ones(2, 4)
    compiled(x, caches())
    x.resize_(1, 4)
    assert not known(compiled, x, caches())
    torch.testing.assert_close(compiled(x, caches())["y"], Scaled()(x, caches())["y"])


def test_a_tensor_given_twice_takes_the_long_road() -> None:
    class Sum(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + 2 * b

    x = torch.ones(3)
    compiled = kimigraph.optimize(Sum(), (torch.ones(3), torch.ones(3)), REFERENCE)
    torch.testing.assert_close(compiled(x, x), 3 * x)
    assert not compiled.known_calls


def test_a_weight_changed_in_place_is_seen_by_a_known_call() -> None:
    model = Scaled()
    compiled = kimigraph.optimize(model, (torch.ones(2, 4), caches()), REFERENCE)
    compiled(torch.ones(2, 4), caches())
    model.weight.zero_()
    assert known(compiled, torch.ones(2, 4), caches())
    assert not compiled(torch.ones(2, 4), caches())["y"].any()


def test_known_calls_are_bounded_with_the_programs(compiled: kimigraph.Compiled) -> None:
    small = kimigraph.optimize(
        Scaled(), (torch.ones(2, 4), caches()), CompileConfig(target="cpu:reference", report=False, max_shapes=2)
    )
    for rows in (1, 2, 3, 1, 2, 3):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(small(x, caches())["y"], Scaled()(x, caches())["y"])
        assert len(small.known_calls) <= 2 and len(small._programs) <= 2
        assert {key for _, key, _ in small.known_calls} <= set(small._programs)
