"""``page-caches``: operators find pages by the table, other readers read gathered rows, nothing computes otherwise."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.descriptors import LatentDescriptor
from kimigraph.ir.errors import UsageError
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes.base import PassContext
from kimigraph.passes.page_caches import PageCaches

B, T, L, R, H, PAGE, PAGES = 2, 10, 8, 4, 3, 4, 9
FORM = LatentDescriptor("contiguous", "float32", L, R)
PAGED = CompileConfig(cache_layout="paged", page_size=PAGE, pages=PAGES)


def write(latent: Tensor, rope: Tensor, values: Tensor, lengths: Tensor) -> None:
    positions = lengths.unsqueeze(1) + torch.arange(values.shape[1])
    torch.ops.kimigraph.latent_write(
        latent, rope, values[..., :L].clone(), values[..., L:].clone(), positions, descriptor=str(FORM)
    )


def by_operator(latent: Tensor, rope: Tensor, values: Tensor, lengths: Tensor, q: Tensor) -> Tensor:
    write(latent, rope, values, lengths)
    parts = q[..., :L].clone(), q[..., L:].clone()
    return torch.ops.kimigraph.latent_attention(
        parts[0], parts[1], latent, rope, lengths + 1, scale=0.3, descriptor=str(FORM)
    )[0]


def by_rows(latent: Tensor, rope: Tensor, values: Tensor, lengths: Tensor, q: Tensor) -> Tensor:
    """Attention that nobody raised: over a view of the whole cache, after the write, and over its rope part."""
    write(latent, rope, values, lengths)
    keys = torch.cat([latent.unsqueeze(1), rope.unsqueeze(1)], dim=-1)
    seen = torch.arange(T) < (lengths + 1).view(B, 1, 1, 1) + torch.arange(q.shape[1]).view(-1, 1)
    scores = (q.transpose(1, 2) @ keys.transpose(-1, -2) * 0.3).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ latent.unsqueeze(1)


def tensors(tokens: int = 3) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    lengths = torch.tensor([2, 6], dtype=torch.int32)
    return [some(B, T, L), some(B, T, R), some(B, tokens, L + R), lengths, some(B, tokens, H, L + R)]


@pytest.fixture
def described(trace: Callable[..., CapturedProgram]) -> Callable[..., CapturedProgram]:
    """Programs whose first two inputs are caches."""

    def make(function: Any, given: list[Tensor]) -> CapturedProgram:
        program = trace(function, *given)
        caches = (replace(spec, kind="cache", descriptor=str(FORM)) for spec in program.inputs[:2])
        program.inputs = (*caches, *program.inputs[2:])
        return program

    return make


def paged(rows: Tensor, table: Tensor) -> Tensor:
    """Pages that hold ``rows`` [B, T, .] as the table says, and NaN elsewhere."""
    pages = torch.full((PAGES + 1, PAGE, rows.shape[-1]), torch.nan)
    pages[0] = 0
    for row, places in enumerate(table.tolist()):
        for column, page in enumerate(places):
            part = rows[row, column * PAGE : (column + 1) * PAGE]
            pages[page, : len(part)] = part
            pages[page, len(part) :] = 0
    return pages


@pytest.mark.parametrize("table", [[[1, 2, 3], [4, 5, 6]], [[9, 1, 5], [2, 8, 3]]])
@pytest.mark.parametrize(("function", "gathers"), [(by_operator, 0), (by_rows, 2)])
def test_pages_hold_and_give_what_rows_did(
    function: Any, gathers: int, table: list[list[int]], described: Any, run: Any
) -> None:
    given, places = tensors(), torch.tensor(table, dtype=torch.int32)
    program = described(function, given)
    wanted, after = run(program, *given)
    result = PageCaches().apply(program, PassContext(PAGED))
    assert result.modified and result.statistics == {"paged": 2, "gathered": gathers}
    names = [spec.source for spec in program.inputs]
    assert names[-1] == "block_table" and program.inputs[-1].shape == (B, 3)
    assert [spec.shape for spec in program.inputs[:2]] == [(PAGES + 1, PAGE, L), (PAGES + 1, PAGE, R)]
    assert {spec.descriptor for spec in program.inputs[:2]} == {str(replace(FORM, layout="paged", page_size=PAGE))}
    caches = [paged(rows, places) for rows in given[:2]]
    got, pages = run(program, *caches, *given[2:], places)
    torch.testing.assert_close(got[0], wanted[0], rtol=1e-6, atol=1e-6)
    for found, rows in zip(pages, after[:2], strict=False):
        torch.testing.assert_close(found[places.long()].flatten(1, 2)[:, :T], rows, rtol=0, atol=0)
    targets = [str(node.target) for node in program.graph_module.graph.nodes]
    assert targets.count("aten.index.Tensor") == gathers


def test_the_model_s_own_layout_changes_nothing(described: Any) -> None:
    program = described(by_operator, tensors())
    assert not PageCaches().apply(program, PassContext(CompileConfig())).modified


def test_a_cache_that_something_else_writes_is_named(described: Any) -> None:
    def foreign(latent: Tensor, rope: Tensor, values: Tensor, lengths: Tensor, q: Tensor) -> Tensor:
        latent[:, 0] = values[:, 0, :L]
        return latent.sum() + rope.sum() + q.sum() + lengths.sum()

    with pytest.raises(UsageError, match=r"writes latent_1.*only latent_write"):
        PageCaches().apply(described(foreign, tensors()), PassContext(PAGED))


def test_caches_of_another_form_are_refused(described: Any) -> None:
    given = tensors()
    program = described(by_operator, given)
    program.inputs = tuple(replace(s, shape=(B, 1, *s.shape[1:])) if s.descriptor else s for s in program.inputs)
    with pytest.raises(UsageError, match=r"not all \[B, T, \.\]"):
        PageCaches().apply(program, PassContext(PAGED))
