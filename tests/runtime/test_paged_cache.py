"""Pages of caches: layouts by descriptor, sharing and copies, running out, and wrong use."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor
from kimigraph.ir.errors import KimigraphError, UsageError
from kimigraph.ir.reference.cache_bytes import read_index_keys, read_latents
from kimigraph.runtime.sequence import PagedCache, PageTable, PoolExhaustedError, SequenceError

LATENT = LatentDescriptor("paged", "bfloat16", 8, 2, 4)
KEY = IndexKeyDescriptor("paged", "float32", 4, 4)


def new_cache(pages: int = 6, *, context: int = 16, debug: bool = True) -> PagedCache:
    layers = {f"cache.{layer}.{part}": LATENT for layer in (0, 2) for part in ("latent", "rope")}
    return PagedCache({**layers, "cache.0.index_key": str(KEY)}, pages, context, debug=debug)


def grown(cache: PagedCache, tokens: int, value: float = 0.0) -> PageTable:
    """A sequence of that many tokens, every row of every buffer holding ``value``."""
    table = cache.new_table()
    grow(cache, table, tokens, value)
    return table


def grow(cache: PagedCache, table: PageTable, tokens: int, value: float) -> None:
    cache.reserve({table: tokens})
    for position in range(table.length, table.length + tokens):
        for tensor in cache.tensors.values():
            tensor[table.pages[position // cache.page_size], position % cache.page_size] = value
    cache.commit({table: tokens})


def values(cache: PagedCache, table: PageTable) -> list[float]:
    """What all buffers hold in the rows of a sequence; they must agree."""
    pages = torch.tensor(table.pages, dtype=torch.int64)
    found = [tensor[pages].flatten(0, 1)[: table.length].float() for tensor in cache.tensors.values()]
    columns = torch.cat(found, dim=1)
    assert torch.equal(columns, columns[:, :1].expand_as(columns))
    return columns[:, 0].tolist()


def state(cache: PagedCache, *tables: PageTable) -> tuple[object, ...]:
    books = [(list(table.pages), table.length, table.reserved) for table in tables]
    return books, cache.free_pages, [tensor.view(torch.uint8).tolist() for tensor in cache.tensors.values()]


def test_layouts_come_from_the_descriptors() -> None:
    fp8 = LatentDescriptor("paged", "float8_e4m3fn", 512, 64, 64, 1, 128, "scales_rope", "power2")
    keys = IndexKeyDescriptor("paged", "float8_e4m3fn", 128, 64, "power2")
    cache = PagedCache({"cache.3.latent": str(fp8), "cache.3.index_key": keys}, 2, 100)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in cache.tensors.items()}
    assert shapes == {
        "cache.3.latent": ((3, 64, 656), torch.uint8),
        "cache.3.index_key": ((3, 64, 132), torch.uint8),
    }
    assert (cache.page_size, cache.columns, cache.page_bytes) == (64, 2, 64 * (656 + 132))
    split = new_cache().tensors
    assert split["cache.2.latent"].shape == (7, 4, 8) and split["cache.2.rope"].shape == (7, 4, 2)
    assert split["cache.0.index_key"].dtype == torch.float32 and split["cache.0.rope"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("descriptors", "message"),
    [
        ({}, "one page size; found none"),
        ({"cache.0.index_key": KEY, "cache.1.index_key": IndexKeyDescriptor("paged", "float32", 4, 8)}, "one page"),
        ({"cache.0.index_key": IndexKeyDescriptor("contiguous", "float32", 4)}, "cache.0.index_key: .* layout=paged"),
        ({"state.0.kda": "state{layout=vk,dtype=float32,heads=1,key_dim=2,value_dim=2}"}, "state.0.kda"),
        ({"cache.0.latent": LATENT}, "name both, cache.0.latent and cache.0.rope"),
    ],
)
def test_descriptors_that_do_not_go_together_are_refused(descriptors: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PagedCache(descriptors, 2, 8)


def test_pages_are_mapped_as_the_sequence_grows() -> None:
    cache = new_cache()
    table = cache.new_table()
    held: list[int] = []
    for position in range(9):
        grow(cache, table, 1, float(position))
        held.append(len(table.pages))
    assert held == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert values(cache, table) == [float(position) for position in range(9)]


def test_a_fork_shares_pages_until_it_writes_and_the_last_sharer_writes_in_place() -> None:
    cache = new_cache()
    first = grown(cache, 6, 1.0)
    second, third = cache.fork(first), cache.fork(first)
    assert second.pages == first.pages and cache.free_pages == 4
    assert cache.pages_wanted({first: 1, second: 1, third: 1}) == 2
    cache.reserve({first: 1, second: 1, third: 1})
    last = {table.pages[1] for table in (first, second, third)}
    assert len(last) == 3 and cache.free_pages == 2
    assert first.pages[0] == second.pages[0] == third.pages[0]
    for table, value in ((first, 2.0), (second, 3.0), (third, 4.0)):
        grow(cache, table, 1, value)
    assert [values(cache, table)[5:] for table in (first, second, third)] == [[1.0, 2.0], [1.0, 3.0], [1.0, 4.0]]


def test_a_fork_at_the_edge_of_a_page_copies_nothing() -> None:
    cache = new_cache()
    first = grown(cache, 8, 1.0)
    second = cache.fork(first)
    grow(cache, second, 1, 2.0)
    grow(cache, first, 1, 3.0)
    assert first.pages[:2] == second.pages[:2] and first.pages[2] != second.pages[2]
    assert values(cache, first) == [1.0] * 8 + [3.0] and values(cache, second) == [1.0] * 8 + [2.0]


def test_who_is_left_with_a_page_writes_it_without_a_copy() -> None:
    cache = new_cache()
    first = grown(cache, 6, 1.0)
    second = cache.fork(first)
    pages = list(first.pages)
    cache.free(first)
    assert cache.free_pages == 4
    grow(cache, second, 1, 2.0)
    assert second.pages == pages and values(cache, second) == [1.0] * 6 + [2.0]


def test_a_truncated_fork_writes_none_of_its_originals_rows() -> None:
    cache = new_cache()
    first = grown(cache, 8, 1.0)
    second = cache.fork(first)
    cache.truncate(second, 2)
    assert len(second.pages) == 1
    grow(cache, second, 4, 2.0)
    assert values(cache, first) == [1.0] * 8
    assert values(cache, second) == [1.0] * 2 + [2.0] * 4


def test_a_fork_takes_no_page_of_which_no_token_was_committed() -> None:
    cache = new_cache()
    first = grown(cache, 3, 1.0)
    grow(cache, first, 1, 1.0)
    cache.reserve({first: 6})
    cache.commit({first: 0})
    assert len(first.pages) == 3
    second = cache.fork(first)
    assert second.pages == first.pages[:1]
    grow(cache, first, 6, 2.0)
    grow(cache, second, 6, 3.0)
    assert values(cache, first) == [1.0] * 4 + [2.0] * 6
    assert values(cache, second) == [1.0] * 4 + [3.0] * 6


def test_truncation_to_the_length_gives_back_what_was_reserved() -> None:
    cache = new_cache()
    table = grown(cache, 3, 1.0)
    cache.reserve({table: 10})
    assert cache.free_pages == 2
    cache.truncate(table, 3)
    assert cache.free_pages == 5 and values(cache, table) == [1.0] * 3
    with pytest.raises(SequenceError, match="0 are reserved"):
        cache.commit({table: 1})


def test_running_out_changes_nothing_for_any_sequence_of_the_batch() -> None:
    cache = new_cache(pages=4)
    first, second = grown(cache, 6, 1.0), grown(cache, 3, 2.0)
    fork = cache.fork(first)
    before = state(cache, first, second, fork)
    # One page to copy, one fresh for the second sequence; one is free.
    with pytest.raises(PoolExhaustedError, match=r"page pool: 2 wanted, 1 of 4 free.*PagedCache\(pages=") as caught:
        cache.reserve({second: 2, fork: 1})
    assert isinstance(caught.value, KimigraphError)
    assert (caught.value.pool, caught.value.wanted, caught.value.free, caught.value.total) == ("page", 2, 1, 4)
    assert state(cache, first, second, fork) == before
    cache.free(first)  # then the fork writes in place
    grow(cache, second, 2, 3.0)
    grow(cache, fork, 1, 4.0)
    assert values(cache, second) == [2.0] * 3 + [3.0] * 2 and values(cache, fork) == [1.0] * 6 + [4.0]


def test_a_copy_that_fails_leaves_the_books_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache()
    first = grown(cache, 6, 1.0)
    fork = cache.fork(first)
    before = state(cache, first, fork)

    def no_memory(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("no memory for the rows")

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "index_select", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reserve({fork: 1})
    assert state(cache, first, fork) == before
    cache.check()
    grow(cache, fork, 1, 2.0)
    assert values(cache, first) == [1.0] * 6


def test_a_sequence_longer_than_the_context_is_refused_before_anything_is_mapped() -> None:
    cache = new_cache(context=10)
    table, other = grown(cache, 9, 1.0), grown(cache, 1, 2.0)
    before = state(cache, table, other)
    with pytest.raises(SequenceError, match="room for 2 tokens behind 9: a sequence holds 10 at most"):
        cache.reserve({other: 8, table: 2})
    assert state(cache, table, other) == before


def test_wrong_use_is_refused() -> None:
    cache = new_cache()
    table = grown(cache, 3, 1.0)
    with pytest.raises(SequenceError, match="truncation to 4 of a sequence of 3"):
        cache.truncate(table, 4)
    with pytest.raises(SequenceError, match="reserve before the step"):
        cache.commit({table: 1})
    cache.reserve({table: 2})
    with pytest.raises(SequenceError, match="commit them first"):
        cache.fork(table)
    with pytest.raises(SequenceError, match="another cache"):
        new_cache().fork(table)
    cache.free(table)
    for use in (lambda: cache.free(table), lambda: cache.reserve({table: 1}), lambda: cache.fork(table)):
        with pytest.raises(SequenceError, match="was freed"):
            use()
    assert cache.free_pages == 6


def test_debug_mode_fills_free_pages_with_nan_in_every_layout() -> None:
    cache = new_cache()
    table = grown(cache, 8, 1.0)
    pages = list(table.pages)
    fork = cache.fork(table)
    cache.free(table)
    assert values(cache, fork) == [1.0] * 8  # the fork still has them
    cache.free(fork)
    assert all(bool(tensor[1:].isnan().all()) for tensor in cache.tensors.values())
    assert set(pages) <= set(range(1, 7))
    scratch = [tensor[0] for tensor in cache.tensors.values()]
    assert all(bool((page == 0).all()) for page in scratch)


def test_nan_bytes_are_nan_in_quantised_rows() -> None:
    fp8 = LatentDescriptor("paged", "float8_e4m3fn", 16, 4, 4, 1, 8, "scales_rope", "power2")
    keys = IndexKeyDescriptor("paged", "float8_e4m3fn", 8, 4, "power2")
    cache = PagedCache({"cache.3.latent": fp8, "cache.3.index_key": keys}, 2, 8, debug=True)
    latent, rope = read_latents(cache.tensors["cache.3.latent"][1:], str(fp8))
    assert bool(latent.isnan().all()) and bool(rope.isnan().all())
    assert bool(read_index_keys(cache.tensors["cache.3.index_key"][1:]).isnan().all())


def test_the_check_finds_a_table_that_names_a_free_page() -> None:
    cache = new_cache()
    table = grown(cache, 8, 1.0)
    stale = torch.tensor([[0, 0], table.pages, [-1, -1]], dtype=torch.int32)
    cache.check_table(stale)
    freed = table.pages[1]
    cache.truncate(table, 4)
    with pytest.raises(SequenceError, match=f"row 1, column 1 names page {freed}, which is free"):
        cache.check_table(stale)
    with pytest.raises(SequenceError, match="row 0, column 0 names page 7, which does not exist"):
        cache.check_table(torch.tensor([[7]]))
    table.pages.append(freed)
    with pytest.raises(SequenceError, match=f"page {freed}: 1 tables name it, the count says 0"):
        cache.check()


def test_without_debug_mode_nothing_is_filled() -> None:
    cache = new_cache(debug=False)
    table = grown(cache, 4, 1.0)
    (page,) = table.pages
    cache.free(table)
    assert all(bool((tensor[page] == 1).all()) for tensor in cache.tensors.values())


def test_a_cache_made_under_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        cache = new_cache()
        table = grown(cache, 3, 1.0)
    fork = cache.fork(table)
    grow(cache, fork, 1, 2.0)
    assert values(cache, fork) == [1.0] * 3 + [2.0]
