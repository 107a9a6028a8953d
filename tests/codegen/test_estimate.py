"""The roofline of a step: what bounds a call, and what a call does not touch is not counted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.codegen.estimate import BYTES_PER_SECOND, FLOPS, LAUNCH_SECONDS, estimate_step, roofline
from kimigraph.ir.operators.registry import Cost

BF16 = torch.bfloat16


def graph_of(function: Callable[..., Any], *tensors: torch.Tensor) -> Graph:
    return make_fx(function, tracing_mode="fake")(*tensors).graph


def only(graph: Graph) -> float:
    """The estimate of the one call that starts work."""
    [seconds] = estimate_step(graph).values()
    return seconds


def test_the_larger_of_bytes_flops_and_a_launch_decides() -> None:
    assert roofline(Cost(43_000_000, 1), BF16) == pytest.approx(1e-5)
    assert roofline(Cost(1, int(790e12)), BF16) == pytest.approx(1.0)
    assert roofline(Cost(1, int(67e12)), torch.float32) == pytest.approx(1.0)
    assert roofline(Cost(10, 10), BF16) == LAUNCH_SECONDS


def test_a_product_is_bound_by_its_weight_or_by_its_work() -> None:
    weight = torch.empty(4096, 4096, dtype=BF16, device="meta")
    thin, wide = (torch.empty(rows, 4096, dtype=BF16, device="meta") for rows in (1, 65536))

    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w)

    assert only(graph_of(product, thin, weight)) == pytest.approx((4096 * 4096 + 2 * 4096) * 2 / BYTES_PER_SECOND)
    assert only(graph_of(product, wide, weight)) == pytest.approx(2 * 65536 * 4096 * 4096 / FLOPS[BF16])


def test_a_lookup_reads_its_rows_alone() -> None:
    table = torch.empty(10_000_000, 64, device="meta")
    rows = torch.empty(8, dtype=torch.int64, device="meta")
    seconds = only(graph_of(lambda t, i: torch.nn.functional.embedding(i, t), table, rows))
    assert seconds == LAUNCH_SECONDS


def test_a_write_into_a_cache_costs_what_is_written() -> None:
    cache, new = torch.empty(1_000_000, 512, device="meta"), torch.empty(1, 512, device="meta")
    rows = torch.empty(1, dtype=torch.int64, device="meta")
    seconds = only(graph_of(lambda c, i, x: c.index_copy_(0, i, x), cache, rows, new))
    assert seconds == LAUNCH_SECONDS


def test_views_cost_nothing() -> None:
    graph = graph_of(lambda x: x.view(4, 4).transpose(0, 1) + 1, torch.empty(16, device="meta"))
    assert [name.partition("_")[0] for name in estimate_step(graph)] == ["add"]
