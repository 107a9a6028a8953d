"""Random lives of sequences against a dictionary of what each of them should hold."""

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from kimigraph.ir.descriptors import ConvDescriptor, Descriptor, IndexKeyDescriptor, LatentDescriptor, StateDescriptor
from kimigraph.ir.reference.cache_bytes import read_index_keys, read_latents
from kimigraph.ir.reference.index_key_write import index_key_write
from kimigraph.ir.reference.latent_write import latent_write
from kimigraph.runtime.sequence import (
    PagedCache,
    PoolExhaustedError,
    SequenceError,
    SequenceHandle,
    SequencePool,
    StatePool,
)

PAGE, PAGES, CONTEXT, SLOTS, TOKENS = 4, 14, 22, 5, 50
LATENT, ROPE, KEY = 16, 4, 8
ROWS = {width: torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(width)) for width in (16, 4, 8)}
"""What token t puts into a row of a cache of that width."""

FORMS: dict[str, tuple[Descriptor, Descriptor]] = {
    "bf16, two buffers": (
        LatentDescriptor("paged", "bfloat16", LATENT, ROPE, PAGE),
        IndexKeyDescriptor("paged", "bfloat16", KEY, PAGE),
    ),
    "fp32, one buffer": (
        LatentDescriptor("paged", "float32", LATENT, ROPE, PAGE, 1),
        IndexKeyDescriptor("paged", "float32", KEY, PAGE),
    ),
    "fp8": (
        LatentDescriptor("paged", "float8_e4m3fn", LATENT, ROPE, PAGE, 1, 8, "rope_scales", "power2"),
        IndexKeyDescriptor("paged", "float8_e4m3fn", KEY, PAGE, "amax"),
    ),
}
LAYERS = (1, 3)


def new_pool(form: str) -> SequencePool:
    latent, key = FORMS[form]
    layout: dict[str, Descriptor | str] = {}
    for layer in LAYERS:
        layout |= {f"cache.{layer}.latent": latent, f"cache.{layer}.index_key": str(key)}
        if form == "bf16, two buffers":
            layout[f"cache.{layer}.rope"] = latent
    states: dict[str, Descriptor | str] = {
        "state.0.kda": StateDescriptor("vk", "float32", 2, 3, 5),
        "state.0.conv": ConvDescriptor(4, 4, 3),
        "state.2.kda": StateDescriptor("kv", "float32", 2, 3, 5),
    }
    cache = PagedCache(layout, PAGES, CONTEXT, debug=True)
    return SequencePool(cache, StatePool(states, SLOTS, conv_dtype=torch.float32, debug=True))


class Life:
    """A pool beside its model: the tokens of each sequence, in order."""

    def __init__(self, form: str) -> None:
        self.form, self.pool = form, new_pool(form)
        self.batch = self.pool.batch(SLOTS + 2)
        self.tokens: dict[SequenceHandle, list[int]] = {}
        self.exhausted = 0

    def _write(self, sequences: list[SequenceHandle], tokens: list[list[int]]) -> None:
        """What a step writes to the caches, padded rows included."""
        self.batch.bind(sequences)
        self.pool.cache.check_table(self.batch.block_table)
        width = max(len(row) for row in tokens)
        padding = [[0] * width] * (self.batch.rows - len(tokens))
        listed = torch.tensor([row + [0] * (width - len(row)) for row in tokens] + padding)
        used = torch.tensor([len(row) for row in tokens] + [width] * len(padding)).unsqueeze(1)
        step = torch.arange(width)
        positions = torch.where(step < used, self.batch.lengths.unsqueeze(1) + step, -1)
        buffers, table = self.pool.tensors, self.batch.block_table
        latent, key = FORMS[self.form]
        for layer in LAYERS:
            sign = -1.0 if layer == 1 else 1.0
            latent_write(
                buffers[f"cache.{layer}.latent"], buffers.get(f"cache.{layer}.rope"), sign * ROWS[LATENT][listed],
                ROWS[ROPE][listed], positions, block_table=table, descriptor=str(latent),
            )  # fmt: skip
            keys = sign * ROWS[KEY][listed]
            index_key_write(
                buffers[f"cache.{layer}.index_key"], keys, positions, block_table=table, descriptor=str(key)
            )

    def _step_states(self, tokens: list[list[int]]) -> None:
        for slot, row in zip(self.batch.slots.tolist(), tokens, strict=False):
            for name, tensor in self.pool.states.tensors.items():
                tensor[slot] = folded(tensor[slot], name, row)

    def _attempt(self, change: Any) -> bool:
        """Do it; when a pool has no room, all must be as it was."""
        before = [(s, list(s.table.pages), s.length, s.table.reserved, s.slot.index) for s in self.tokens]
        free = (self.pool.cache.free_pages, self.pool.states.free_slots)
        try:
            change()
        except PoolExhaustedError as error:
            self.exhausted += 1
            assert error.wanted > error.free == (free[0] if error.pool == "page" else free[1])
            assert before == [(s, s.table.pages, s.length, s.table.reserved, s.slot.index) for s in self.tokens]
            assert free == (self.pool.cache.free_pages, self.pool.states.free_slots)
            return False
        return True

    def join(self, prompt: list[int]) -> None:
        joined: list[SequenceHandle] = []
        if self._attempt(lambda: joined.append(self.pool.join(len(prompt)))):
            self._write(joined, [prompt])
            self._step_states([prompt])
            self.pool.commit({joined[0]: len(prompt)})
            self.tokens[joined[0]] = list(prompt)

    def extend(self, chosen: list[int], tokens: list[int], *, kept: int) -> None:
        """A ragged step: sequence i of the batch gets one token less than the one before it, but at least one.

        Of each row the first ``kept`` tokens stay, as after a check of drafts; with none of them the step is given up.
        """
        sequences = self.pick(chosen)
        rows = [tokens[: max(1, len(tokens) - place)] for place in range(len(sequences))]
        wanted = {sequence: len(row) for sequence, row in zip(sequences, rows, strict=True)}
        if any(sequence.length + count > CONTEXT for sequence, count in wanted.items()):
            with pytest.raises(SequenceError, match=f"holds {CONTEXT} at most"):
                self.pool.reserve(wanted)
            return
        if not wanted or not self._attempt(lambda: self.pool.reserve(wanted)):
            return
        self._write(sequences, rows)
        if not kept:
            for sequence in sequences:
                self.pool.truncate(sequence, sequence.length)
            return
        rows = [row[:kept] for row in rows]
        self._step_states(rows)
        self.pool.commit({sequence: len(row) for sequence, row in zip(sequences, rows, strict=True)})
        for sequence, row in zip(sequences, rows, strict=True):
            self.tokens[sequence] += row

    def fork(self, which: int) -> None:
        for sequence in self.pick([which]):
            forks: list[SequenceHandle] = []
            if self._attempt(lambda origin=sequence, into=forks: into.append(self.pool.fork(origin))):
                self.tokens[forks[0]] = list(self.tokens[sequence])

    def truncate(self, which: int, length: int) -> None:
        for sequence in self.pick([which]):
            length = min(length, sequence.length)
            if 0 < length < sequence.length:
                with pytest.raises(SequenceError, match="cannot be taken back"):
                    self.pool.truncate(sequence, length)
                states = self.pool.states
                if not states.free_slots:
                    return
                past = states.allocate()
                for name, tensor in states.tensors.items():
                    tensor[past.index] = folded(tensor[past.index], name, self.tokens[sequence][:length])
                self.pool.truncate(sequence, length, past)
                states.free(past)
            else:
                self.pool.truncate(sequence, length)
            del self.tokens[sequence][length:]

    def leave(self, which: int) -> None:
        for sequence in self.pick([which]):
            del self.tokens[sequence]
            self.pool.leave(sequence)
            with pytest.raises(SequenceError):
                self.batch.bind([sequence])

    def pick(self, numbers: list[int]) -> list[SequenceHandle]:
        known = list(self.tokens)
        return list(dict.fromkeys(known[number % len(known)] for number in numbers)) if known else []

    def check(self) -> None:
        """Every sequence holds its tokens in all layers, and all that is free is NaN."""
        self.pool.cache.check()
        assert self.pool.states.free_slots == SLOTS - len(self.tokens)
        for sequence, tokens in self.tokens.items():
            assert sequence.length == len(tokens)
            for name, found in read_rows(self.pool, self.form, sequence).items() if tokens else ():
                assert torch.equal(found[: len(tokens)], EXPECTED[self.form][name][tokens]), name
            for name, tensor in self.pool.states.tensors.items():
                assert torch.equal(tensor[sequence.slot.index], folded(torch.zeros_like(tensor[0]), name, tokens))
        named = {page for sequence in self.tokens for page in sequence.table.pages}
        free_pages = [page for page in range(1, PAGES + 1) if page not in named]
        assert len(free_pages) == self.pool.cache.free_pages
        taken = {sequence.slot.index for sequence in self.tokens}
        free_slots = [slot for slot in range(1, SLOTS + 1) if slot not in taken]
        for name, tensor in self.pool.tensors.items():
            free = free_pages if name.startswith("cache") else free_slots
            assert bool((tensor[free].view(torch.uint8) == 0xFF).all()), name


def folded(state: Tensor, name: str, tokens: list[int]) -> Tensor:
    """A state after some tokens more: a convolution keeps the last three, a recurrence mixes all of them."""
    for token in tokens:
        value = torch.full_like(state[..., :1], token + 1.0)
        state = torch.cat([state[..., 1:], value], -1) if name.endswith("conv") else state * -0.5 + value
    return state


def read_rows(pool: SequencePool, form: str, sequence: SequenceHandle) -> dict[str, Tensor]:
    pages = sequence.table.pages
    read: dict[str, Tensor] = {}
    for layer in LAYERS:
        latent = pool.tensors[f"cache.{layer}.latent"][pages]
        if form == "bf16, two buffers":
            parts = latent.float(), pool.tensors[f"cache.{layer}.rope"][pages].float()
        else:
            parts = read_latents(latent, str(FORMS[form][0]))
        keys = pool.tensors[f"cache.{layer}.index_key"][pages]
        read[f"{layer}.latent"], read[f"{layer}.rope"] = (part.flatten(0, 1) for part in parts)
        read[f"{layer}.key"] = (read_index_keys(keys) if keys.dtype == torch.uint8 else keys.float()).flatten(0, 1)
    return read


def expected_rows(form: str) -> dict[str, Tensor]:
    """The rows of all tokens as one contiguous sequence of that form reads them back."""
    latent, key = FORMS[form]
    assert isinstance(latent, LatentDescriptor) and isinstance(key, IndexKeyDescriptor)
    every = torch.arange(TOKENS).unsqueeze(0)
    bytes_ = latent.dtype == "float8_e4m3fn"
    dtype = torch.uint8 if bytes_ else getattr(torch, latent.dtype)
    rows: dict[str, Tensor] = {}
    for layer in LAYERS:
        sign = -1.0 if layer == 1 else 1.0
        cache = torch.zeros(1, TOKENS, latent.row if bytes_ else LATENT, dtype=dtype)
        rope = None if bytes_ else torch.zeros(1, TOKENS, ROPE, dtype=dtype)
        latent_write(cache, rope, sign * ROWS[LATENT][None], ROWS[ROPE][None], every, descriptor=str(latent))
        keys = torch.zeros(1, TOKENS, key.row, dtype=dtype)
        index_key_write(keys, sign * ROWS[KEY][None], every, descriptor=str(key))
        parts = read_latents(cache, str(latent)) if rope is None else (cache.float(), rope.float())
        rows[f"{layer}.latent"], rows[f"{layer}.rope"] = (part[0] for part in parts)
        rows[f"{layer}.key"] = (read_index_keys(keys) if bytes_ else keys.float())[0]
    return rows


EXPECTED = {form: expected_rows(form) for form in FORMS}

token = st.integers(0, TOKENS - 1)
number = st.integers(0, SLOTS - 1)


class LifeMachine(RuleBasedStateMachine):
    @initialize(form=st.sampled_from(sorted(FORMS)))
    def begin(self, form: str) -> None:
        self.life = Life(form)

    @rule(prompt=st.lists(token, min_size=1, max_size=9))
    def join(self, prompt: list[int]) -> None:
        self.life.join(prompt)

    @rule(
        chosen=st.lists(number, min_size=1, max_size=4),
        tokens=st.lists(token, min_size=1, max_size=6),
        kept=st.sampled_from([0, 1, 3, 6, 6, 6]),
    )
    def extend(self, chosen: list[int], tokens: list[int], kept: int) -> None:
        self.life.extend(chosen, tokens, kept=kept)

    @rule(which=number)
    def fork(self, which: int) -> None:
        self.life.fork(which)

    @rule(which=number, length=st.integers(0, CONTEXT))
    def truncate(self, which: int, length: int) -> None:
        self.life.truncate(which, length)

    @rule(which=number)
    def leave(self, which: int) -> None:
        self.life.leave(which)

    @invariant()
    def all_is_there(self) -> None:
        self.life.check()


LifeMachine.TestCase.settings = settings(
    max_examples=20, stateful_step_count=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestLife = LifeMachine.TestCase


class LongLifeMachine(LifeMachine):
    pass


LongLifeMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLongLife = pytest.mark.slow(LongLifeMachine.TestCase)


def live(form: str, seed: int, operations: int) -> Life:
    """One pool's life over that many random operations, checked after each."""
    life, draw = Life(form), random.Random(seed)

    def some(most: int, below: int) -> list[int]:
        return [draw.randrange(below) for _ in range(draw.randint(1, most))]

    for _ in range(operations):
        match draw.choices(("join", "extend", "part", "abort", "fork", "truncate", "leave"), (4, 8, 2, 2, 3, 2, 2))[0]:
            case "join":
                life.join(some(9, TOKENS))
            case "extend":
                life.extend(some(4, SLOTS), some(6, TOKENS), kept=6)
            case "part":
                life.extend(some(4, SLOTS), some(6, TOKENS), kept=draw.randint(1, 5))
            case "abort":
                life.extend(some(4, SLOTS), some(6, TOKENS), kept=0)
            case "fork":
                life.fork(draw.randrange(SLOTS))
            case "truncate":
                life.truncate(draw.randrange(SLOTS), draw.randint(0, CONTEXT))
            case _:
                life.leave(draw.randrange(SLOTS))
        life.check()
    return life


@pytest.mark.parametrize("form", FORMS)
def test_one_pool_lives_through_many_operations(form: str) -> None:
    assert live(form, 1, 300).exhausted > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", FORMS)
def test_one_pool_lives_through_a_thousand_operations(form: str, seed: int) -> None:
    assert live(form, seed, 1000).exhausted > 20
