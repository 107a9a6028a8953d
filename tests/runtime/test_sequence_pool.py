"""Slots of states, sequences in both pools, and the tables of a batch."""

from typing import Any

import pytest
import torch

from kimigraph.ir.descriptors import ConvDescriptor, IndexKeyDescriptor, StateDescriptor
from kimigraph.ir.errors import UsageError
from kimigraph.ir.reference.index_key_write import index_key_write
from kimigraph.ir.reference.kda_decode import kda_decode
from kimigraph.runtime.sequence import (
    PagedCache,
    PoolExhaustedError,
    SequenceError,
    SequenceHandle,
    SequencePool,
    StatePool,
)

HEADS, KEY_DIM, VALUE_DIM, WIDTH = 2, 3, 5, 4
CHANNELS = HEADS * (2 * KEY_DIM + VALUE_DIM)
STATES = {
    "state.0.kda": str(StateDescriptor("vk", "float32", HEADS, KEY_DIM, VALUE_DIM)),
    "state.0.conv": str(ConvDescriptor(CHANNELS, WIDTH, WIDTH - 1)),
    "state.2.kda": str(StateDescriptor("kv", "float32", HEADS, KEY_DIM, VALUE_DIM)),
}
KEYS = {"cache.1.index_key": IndexKeyDescriptor("paged", "float32", 4, 4)}


def new_states(slots: int = 3, *, debug: bool = True) -> StatePool:
    return StatePool(STATES, slots, conv_dtype=torch.float32, debug=debug)


def new_pool(pages: int = 6, slots: int = 3) -> SequencePool:
    return SequencePool(PagedCache(KEYS, pages, 16, debug=True), new_states(slots))


def kda_step(states: StatePool, slots: torch.Tensor, seed: int) -> torch.Tensor:
    """One step of layer 0 over the rows of ``slots``; row b's inputs depend on the seed and b alone."""
    rows = [torch.Generator().manual_seed(seed + row) for row in range(len(slots))]

    def stacked(*shape: int) -> torch.Tensor:
        return torch.stack([torch.randn(*shape, generator=generator) for generator in rows])

    shared = torch.Generator().manual_seed(99)
    weight, bias = torch.randn(CHANNELS, WIDTH, generator=shared), torch.randn(HEADS * KEY_DIM, generator=shared)
    return kda_decode(
        stacked(1, CHANNELS), weight, states.tensors["state.0.conv"], stacked(1, HEADS * KEY_DIM), bias,
        torch.zeros(HEADS), stacked(1, HEADS), states.tensors["state.0.kda"], slots=slots, scale=0.5, state_layout="vk",
    )  # fmt: skip


def test_layouts_come_from_the_descriptors() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in new_states().tensors.items()}
    assert shapes == {
        "state.0.kda": (4, HEADS, VALUE_DIM, KEY_DIM),
        "state.0.conv": (4, CHANNELS, WIDTH - 1),
        "state.2.kda": (4, HEADS, KEY_DIM, VALUE_DIM),
    }
    assert new_states().slot_bytes == 4 * (2 * HEADS * VALUE_DIM * KEY_DIM + CHANNELS * (WIDTH - 1))
    half = StatePool({"state.0.conv": STATES["state.0.conv"]}, 1)
    assert half.tensors["state.0.conv"].dtype == torch.bfloat16
    with pytest.raises(UsageError, match=r"cache\.1\.index_key: .* is no recurrent state"):
        StatePool({"cache.1.index_key": str(KEYS["cache.1.index_key"])}, 1)


@pytest.mark.parametrize("debug", [False, True])
def test_a_slot_in_use_before_starts_at_zero_even_after_nan(debug: bool) -> None:
    states = new_states(slots=1, debug=debug)
    slot = states.allocate()
    for tensor in states.tensors.values():
        tensor[slot.index] = torch.nan
    states.free(slot)
    again = states.allocate()
    assert again.index == slot.index
    assert all(bool((tensor[again.index] == 0).all()) for tensor in states.tensors.values())
    fresh = new_states(slots=1)
    index = torch.tensor([again.index])
    fresh.allocate()
    assert torch.equal(kda_step(states, index, 5), kda_step(fresh, index, 5))
    with pytest.raises(SequenceError, match="slot 1 was freed"):
        states.reset(slot)  # the old handle does not name the new owner's states


def test_free_slots_hold_nan_in_debug_mode() -> None:
    states = new_states()
    slot = states.allocate()
    states.free(slot)
    for tensor in states.tensors.values():
        assert bool(tensor[1:].isnan().all()) and bool((tensor[0] == 0).all())


def test_a_fork_and_its_original_go_apart() -> None:
    states = new_states()
    first = states.allocate()
    kda_step(states, torch.tensor([first.index]), 1)
    second = states.fork(first)
    kept = {name: tensor[first.index].clone() for name, tensor in states.tensors.items()}
    for name, tensor in states.tensors.items():
        assert torch.equal(tensor[second.index], kept[name])
    kda_step(states, torch.tensor([second.index]), 2)
    assert all(torch.equal(tensor[first.index], kept[name]) for name, tensor in states.tensors.items())
    assert not torch.equal(states.tensors["state.0.kda"][second.index], kept["state.0.kda"])
    states.copy(first, second)
    assert all(torch.equal(tensor[second.index], kept[name]) for name, tensor in states.tensors.items())
    states.reset(first)
    assert all(bool((tensor[first.index] == 0).all()) for tensor in states.tensors.values())
    assert torch.equal(states.tensors["state.0.kda"][second.index], kept["state.0.kda"])


def books(pool: SequencePool, *sequences: SequenceHandle) -> list[Any]:
    rows = [(list(s.table.pages), s.length, s.table.reserved, s.slot.index) for s in sequences]
    contents = [
        pool.tensors[name][s.table.pages if name.startswith("cache") else [s.slot.index]].view(torch.uint8).tolist()
        for s in sequences
        for name in pool.tensors
    ]
    return [rows, contents, pool.cache.free_pages, pool.states.free_slots]


def test_no_pages_leaves_the_slot_free_and_no_slot_leaves_the_pages_free() -> None:
    pool = new_pool(pages=4, slots=2)
    first = pool.join(9)
    pool.commit({first: 9})
    before = books(pool, first)
    with pytest.raises(PoolExhaustedError, match="page pool: 2 wanted, 1 of 4 free"):
        pool.join(5)
    assert books(pool, first) == before
    second = pool.join(4)
    before = books(pool, first, second)
    for attempt in (lambda: pool.join(0), lambda: pool.fork(first)):
        with pytest.raises(PoolExhaustedError, match=r"state slot pool: 1 wanted, 0 of 2 free.*StatePool\(slots="):
            attempt()
        assert books(pool, first, second) == before
    pool.cache.check()
    pool.leave(second)
    assert pool.fork(first).table.pages == first.table.pages  # after a sequence has left there is room


def test_a_fork_that_is_refused_takes_no_slot() -> None:
    pool = new_pool()
    sequence = pool.join(3)
    with pytest.raises(SequenceError, match="3 reserved tokens"):
        pool.fork(sequence)
    assert pool.states.free_slots == 2


def test_recurrent_states_are_not_taken_back_by_truncation() -> None:
    pool = new_pool()
    sequence = pool.join(2)
    kda_step(pool.states, torch.tensor([sequence.slot.index]), 1)
    pool.commit({sequence: 2})
    past = pool.states.fork(sequence.slot)
    after_two = pool.states.tensors["state.0.kda"][past.index].clone()
    pool.reserve({sequence: 4})
    kda_step(pool.states, torch.tensor([sequence.slot.index]), 2)
    pool.commit({sequence: 4})
    before = books(pool, sequence)
    with pytest.raises(SequenceError, match="truncation from 6 to 2 tokens: recurrent states cannot be taken back"):
        pool.truncate(sequence, 2)
    with pytest.raises(SequenceError, match="truncation to 7"):
        pool.truncate(sequence, 7, past)
    assert books(pool, sequence) == before
    pool.truncate(sequence, 2, past)
    assert sequence.length == 2 and len(sequence.table.pages) == 1
    assert torch.equal(pool.states.tensors["state.0.kda"][sequence.slot.index], after_two)
    pool.truncate(sequence, 0)
    assert sequence.table.pages == [] and not pool.states.tensors["state.0.kda"][sequence.slot.index].any()


def test_a_model_without_recurrent_layers_truncates_freely() -> None:
    pool = SequencePool(PagedCache(KEYS, 4, 16), StatePool({}, 2))
    sequence = pool.join(6)
    pool.commit({sequence: 6})
    pool.truncate(sequence, 3)
    assert sequence.length == 3 and pool.cache.free_pages == 3


def test_a_batch_shows_pages_lengths_and_slots_in_tensors_that_stay() -> None:
    pool = new_pool()
    batch = pool.batch(4)
    places = [tensor.data_ptr() for tensor in (batch.block_table, batch.lengths, batch.slots)]
    a, b, c = pool.join(3), pool.join(5), pool.join(2)
    pool.commit({a: 3, b: 5, c: 2})
    pool.reserve({c: 1, b: 1})
    batch.bind([c, b])
    assert batch.block_table.dtype == batch.lengths.dtype == batch.slots.dtype == torch.int32
    assert batch.block_table.tolist() == [[4, -1, -1, -1], [2, 3, -1, -1], [0] * 4, [0] * 4]
    assert batch.lengths.tolist() == [2, 5, 0, 0] and batch.slots.tolist() == [3, 2, 0, 0]
    # A sequence in between leaves, the batch is in another order and holds fewer: no page number is left over.
    pool.leave(b)
    batch.bind([None, c])
    assert batch.block_table.tolist() == [[0] * 4, [4, -1, -1, -1], [0] * 4, [0] * 4]
    assert batch.lengths.tolist() == [0, 2, 0, 0] and batch.slots.tolist() == [0, 3, 0, 0]
    pool.reserve({a: 6})
    batch.bind([a, c])
    assert batch.block_table.tolist()[0] == [1, *a.table.pages[1:], -1] and len(a.table.pages) == 3
    batch.bind([])
    assert not batch.block_table.any() and not batch.lengths.any() and not batch.slots.any()
    assert places == [tensor.data_ptr() for tensor in (batch.block_table, batch.lengths, batch.slots)]


def test_a_batch_follows_pages_that_a_copy_or_a_truncation_changed() -> None:
    pool = new_pool()
    batch = pool.batch(2)
    first = pool.join(3)
    pool.commit({first: 3})
    second = pool.fork(first)
    batch.bind([first, second])
    assert batch.block_table[:, 0].tolist() == [1, 1]
    pool.reserve({first: 1, second: 1})
    batch.bind([first, second])
    assert batch.block_table[:, 0].tolist() == [2, 1]
    pool.truncate(first, 0)
    batch.bind([first, second])
    assert batch.block_table[:, 0].tolist() == [-1, 1]


def test_a_batch_refuses_sequences_that_left_stand_twice_or_are_too_many() -> None:
    pool = new_pool()
    batch = pool.batch(2)
    first, second = pool.join(3), pool.join(3)
    batch.bind([first, second])
    shown = batch.block_table.tolist()
    with pytest.raises(SequenceError, match="stands in two rows"):
        batch.bind([first, first])
    with pytest.raises(UsageError, match="3 sequences for tables of 2 rows"):
        batch.bind([first, second, None])
    pool.leave(first)
    with pytest.raises(SequenceError, match="was freed"):
        batch.bind([second, first])
    assert batch.block_table.tolist() == shown


def test_padded_rows_change_no_sequence() -> None:
    pool = new_pool()
    sequence, bystander = pool.join(2), pool.join(3)
    pool.commit({sequence: 2, bystander: 3})
    batch = pool.batch(5)
    pool.reserve({sequence: 1})
    before = books(pool, bystander)
    free_slots = {name: tensor[3].view(torch.uint8).tolist() for name, tensor in pool.states.tensors.items()}
    batch.bind([sequence])
    keys = pool.tensors["cache.1.index_key"]
    index_key_write(keys, torch.full((5, 1, 4), 7.0), batch.lengths.unsqueeze(1), block_table=batch.block_table)
    out = kda_step(pool.states, batch.slots, 1)
    pool.commit({sequence: 1})
    assert bool((out[1:] == 0).all()) and bool(out[0].any())
    assert bool((keys[sequence.table.pages[0], 2] == 7).all())
    assert books(pool, bystander) == before
    assert free_slots == {name: tensor[3].view(torch.uint8).tolist() for name, tensor in pool.states.tensors.items()}
    assert all(not tensor[0].any() for tensor in pool.states.tensors.values())


def test_a_row_is_the_same_whatever_slot_and_row_it_has() -> None:
    crowded, alone = new_pool(), new_pool()
    others = [crowded.join(1), crowded.join(1)]
    crowded.leave(others[0])
    late = crowded.join(1)
    only = alone.join(1)
    assert late.slot.index == 1
    big, small = crowded.batch(3), alone.batch(1)
    for step in range(3):
        big.bind([None, late, others[1]])
        small.bind([only])
        wide = kda_step(crowded.states, big.slots, 10 * step)
        narrow = kda_step(alone.states, small.slots, 10 * step + 1)
        torch.testing.assert_close(wide[1], narrow[0], rtol=1e-5, atol=1e-6)
    for name in ("state.0.kda", "state.0.conv"):
        found, wanted = crowded.states.tensors[name][late.slot.index], alone.states.tensors[name][only.slot.index]
        assert bool(found.any())
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
