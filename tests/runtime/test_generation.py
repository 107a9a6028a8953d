"""The scheduler over a toy model whose answers need its whole history, against that model run alone."""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from kimigraph.ir.descriptors import LatentDescriptor
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.generation import Engine, PagedSlots, Pool, Row, Sampling, SlotCaches, Slots, TextStream
from kimigraph.runtime.generation.engine import buckets
from kimigraph.runtime.generation.sampling import Draws, choose, distribution
from kimigraph.runtime.sequence import PoolExhaustedError, SequenceError

VOCABULARY, CONTEXT, PAGE = 13, 12, 4
ROWS = {"cache.0.tokens": Row((CONTEXT,), torch.int64), "state.0.sum": Row((1,), torch.int64)}


def scores(history: list[int], total: int) -> Tensor:
    """Logits that depend on every token, on their order, and on the state."""
    mixed = total
    for token in history:
        mixed = (mixed * 31 + token + 1) % 10007
    return torch.tensor([(mixed * (token + 3) * 17) % 101 for token in range(VOCABULARY)], dtype=torch.float32)


class Toy:
    """Writes tokens into a cache and their running sum into a state; counts the programs that were asked for."""

    def __init__(self) -> None:
        self.asked: set[tuple[int, int]] = set()

    def step(
        self, batch: int, tokens: int, caches: Mapping[str, Tensor]
    ) -> Callable[[list[list[int]], list[int]], Tensor]:
        self.asked.add((batch, tokens))
        if "block_table" in caches:
            return paged_toy(batch, tokens, caches)
        cache, state = caches["cache.0.tokens"], caches["state.0.sum"]

        def run(ids: list[list[int]], lengths: list[int]) -> Tensor:
            assert cache.shape[0] == batch and [len(row) for row in ids] == [tokens] * batch
            found = []
            for row, (given, length) in enumerate(zip(ids, lengths, strict=True)):
                cache[row, length : length + tokens] = torch.tensor(given)
                state[row] += sum(given) + 1
                found.append(scores(cache[row, : length + tokens].tolist(), int(state[row])))
            return torch.stack(found)

        return run


def paged_toy(batch: int, tokens: int, caches: Mapping[str, Tensor]) -> Callable[[list[list[int]], list[int]], Tensor]:
    """The same over pages; it writes and reads nothing but through the block table."""
    pages, table, state = caches["cache.0.latent"], caches["block_table"], caches["state.0.sum"]
    assert table.shape[0] == batch

    def run(ids: list[list[int]], lengths: list[int]) -> Tensor:
        found = []
        for row, (given, length) in enumerate(zip(ids, lengths, strict=True)):
            for place, token in enumerate(given, length):
                pages[table[row, place // PAGE], place % PAGE, 0] = token
            history = pages[table[row].clamp(min=0)].flatten()[: length + tokens]
            assert not history.isnan().any()
            state[row] += sum(given) + 1
            found.append(scores([int(token) for token in history], int(state[row])))
        return torch.stack(found)

    return run


def alone(prompt: list[int], sampling: Sampling, place: int = 0, chunks: tuple[int, ...] = (4, 2)) -> list[int]:
    """What the toy says to ``prompt`` without any scheduler."""
    history, total, tokens = list(prompt), sum(prompt), list[int]()
    rest = len(prompt)
    for size in (*chunks, 1):  # the state counts the pieces, so that a piece too many or too few shows
        total, rest = total + rest // size, rest % size
    draws = Draws(sampling.seed, place)
    while True:
        tokens += choose(scores(history, total).unsqueeze(0), [sampling], [draws])
        ended = tokens[-1] in (sampling.stop_ids or ()) or len(tokens) == sampling.max_new_tokens
        if ended or len(history) == CONTEXT:
            return tokens
        history.append(tokens[-1])
        total += tokens[-1] + 1


def paged(slots: int, pages: int) -> PagedSlots:
    pool = Pool({"cache.0.latent": LatentDescriptor("paged", "float32", 1, 0, PAGE)}, pages, CONTEXT, debug=True)
    return PagedSlots({"state.0.sum": ROWS["state.0.sum"]}, pool, slots)


def engine(slots: int | Slots = 4, **options: object) -> tuple[Engine, Toy]:
    toy = Toy()
    places = SlotCaches(ROWS, slots) if isinstance(slots, int) else slots
    return Engine(toy, places, CONTEXT, chunks=(4, 2), **options), toy


def drain(running: Engine) -> dict[int, tuple[list[int], str]]:
    found: dict[int, tuple[list[int], str]] = {}
    while running.busy:
        for event in running.step():
            tokens, _ = found.setdefault(event.number, ([], ""))
            found[event.number] = ([*tokens, *([] if event.token is None else [event.token])], event.finish or "")
    return found


PROMPTS = [[1, 2, 3], [4], [5] * 9, [6, 7], [8, 9, 10, 11, 12, 1, 2], [3] * 12]


@pytest.mark.parametrize("pages", [None, 4, 30])
@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_sequence_is_what_it_is_alone_in_any_batch(slots: int, temperature: float, pages: int | None) -> None:
    running, _ = engine(slots if pages is None else paged(slots, pages))
    asked = [Sampling(max_new_tokens=2 + place, temperature=temperature, seed=5) for place in range(len(PROMPTS))]
    numbers = [running.submit(prompt, asked[place], place) for place, prompt in enumerate(PROMPTS)]
    found = drain(running)
    for place, number in enumerate(numbers):
        assert found[number][0] == alone(PROMPTS[place], asked[place], place)


def test_programs_are_those_of_buckets_and_pieces() -> None:
    running, toy = engine(6)
    assert running.batches == buckets(6) == (1, 2, 4, 6)
    for prompt in PROMPTS:
        running.submit(prompt, Sampling(max_new_tokens=3))
    drain(running)
    assert toy.asked <= {(1, 1), (1, 2), (1, 4), (2, 1), (4, 1), (6, 1)}
    assert running.pieces(11) == [4, 4, 2, 1]


def test_ends_are_told_with_their_reason() -> None:
    running, _ = engine()
    first = alone([1, 2, 3], Sampling(max_new_tokens=1))[0]
    stopped = running.submit([1, 2, 3], Sampling(max_new_tokens=5, stop_ids=(first,)))
    full = running.submit([5] * 11, Sampling(max_new_tokens=5))
    found = drain(running)
    assert found[stopped] == ([first], "stop")
    assert len(found[full][0]) == 2 and found[full][1] == "context"


def test_a_long_prompt_keeps_no_sequence_waiting() -> None:
    running, _ = engine(budget=1)
    running.submit([1], Sampling(max_new_tokens=8))
    running.step()
    running.submit([2] * 12, Sampling(max_new_tokens=1))
    for _ in range(3):
        assert len(running.step()) >= 1


def test_no_more_than_its_budget_is_read_in_a_step() -> None:
    """Behind the rest of one prompt there may be no room for a piece of the next."""
    running, _ = engine(budget=5)
    for length in (3, 12, 6):
        running.submit([2] * length, Sampling(max_new_tokens=1))
    read = [0]
    while running.busy:
        running.step()
        read.append(running.read)
    steps = [after - before for before, after in itertools.pairwise(read)]
    assert sum(steps) == 21 and max(steps) <= 5


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    running, _ = engine(1, max_waiting=1)
    for prompt in ([], [1] * (CONTEXT + 1)):
        with pytest.raises(UsageError):
            running.submit(prompt, Sampling())
    number = running.submit([1, 2], Sampling(max_new_tokens=4))
    with pytest.raises(PoolExhaustedError, match="max_waiting"):
        running.submit([3], Sampling())
    assert drain(running)[number][0] == alone([1, 2], Sampling(max_new_tokens=4))
    running.submit([3], Sampling())  # there is room again


def test_slots_run_out_and_come_back() -> None:
    slots = SlotCaches(ROWS, 2)
    assert (slots.allocate(), slots.allocate()) == (0, 1)
    with pytest.raises(PoolExhaustedError):
        slots.allocate()
    slots.free(0)
    with pytest.raises(SequenceError):
        slots.free(0)
    assert slots.lower(1) == 0 and slots.free_slots == 1


def test_a_fork_goes_on_as_its_original_did_and_shares_its_pages() -> None:
    slots = paged(4, 8)
    running, _ = engine(slots)
    number = running.submit([1] * 6, Sampling(max_new_tokens=4))
    running.step()
    running.step()
    free = slots.cache.free_pages
    other = running.fork(number)
    assert slots.cache.free_pages == free - 2  # the first page is shared, the second copied, the third its own
    drawn = running.fork(number, Sampling(max_new_tokens=3, temperature=3.0, seed=4), place=7)
    found = drain(running)
    assert found[other][0] == found[number][0][-len(found[other][0]) :]
    assert len(found[drawn][0]) == 1 and found[drawn][1] == "length"
    assert slots.cache.free_pages == 8 and slots.free_slots == 4


def test_what_cannot_be_forked_is_told_and_changes_nothing() -> None:
    slots = paged(2, 4)
    running, _ = engine(slots, budget=4)
    number = running.submit([1] * 6, Sampling(max_new_tokens=6))
    running.step()
    with pytest.raises(UsageError, match="does not run"):
        running.fork(number)  # still being read
    running.step()
    free = slots.cache.free_pages
    with pytest.raises(UsageError, match="allow its fork more"):
        running.fork(number, Sampling(max_new_tokens=1))
    with pytest.raises(PoolExhaustedError):
        running.fork(number)  # two pages more are wanted and one is free
    assert (slots.cache.free_pages, slots.free_slots) == (free, 1)
    assert drain(running)[number][0] == alone([1] * 6, Sampling(max_new_tokens=6))[1:]


def test_a_sequence_waits_for_pages_and_one_that_can_never_have_them_is_refused() -> None:
    running, _ = engine(paged(3, 3))
    first = running.submit([1] * 9, Sampling(max_new_tokens=3))
    second = running.submit([2] * 5, Sampling(max_new_tokens=2))
    running.step()
    assert [request.number for request in running.requests] == [first, second]
    found = drain(running)
    assert found[second][0] == alone([2] * 5, Sampling(max_new_tokens=2))
    small, _ = engine(paged(3, 2))
    with pytest.raises(UsageError, match="more than all pages hold"):
        small.submit([1] * 9, Sampling(max_new_tokens=3))


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_tensors_of_steps_begin_where_kernels_hold_them_to_begin(slots: int) -> None:
    """Programs on a GPU take tensors at multiples of 16 bytes; tables of three columns are no such multiple."""
    made = paged(slots, pages=9)
    assert made.cache.columns == 3
    tensors = [*made.staging.values(), *(t for rows in range(1, slots + 1) for t in made.first(rows).values())]
    assert not [tensor.shape for tensor in tensors if tensor.data_ptr() % 16]


def test_a_fork_leaves_the_slot_of_the_sequence_that_is_being_read():
    running, _ = engine(SlotCaches(ROWS, 2), budget=2)
    first = running.submit([1], Sampling(max_new_tokens=6))
    running.step()
    second = running.submit([2] * 5, Sampling(max_new_tokens=2))
    running.step()
    with pytest.raises(PoolExhaustedError):
        running.fork(first)
    assert drain(running)[second][0] == alone([2] * 5, Sampling(max_new_tokens=2))


class Joining(RuleBasedStateMachine):
    """Sequences join, leave, are forked and aborted between steps; each must say what it says alone."""

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.toy = engine(self.places(), budget=5)
        self.before: dict[int, int] = {}
        """Tokens that a fork had when it was made; its original told them."""
        self.asked: dict[int, tuple[list[int], Sampling, int]] = {}
        self.made: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}

    @rule(
        prompt=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=CONTEXT),
        new=st.integers(1, 6),
        temperature=st.sampled_from([0.0, 2.0]),
        place=st.integers(0, 3),
    )
    def join(self, prompt: list[int], new: int, temperature: float, place: int) -> None:
        sampling = Sampling(max_new_tokens=new, temperature=temperature, top_k=5, stop_ids=(0,))
        number = self.engine.submit(prompt, sampling, place)
        self.asked[number], self.made[number] = (prompt, sampling, place), []

    @rule()
    def step(self) -> None:
        for event in self.engine.step():
            assert event.number not in self.ended
            if event.token is not None:
                self.made[event.number].append(event.token)
            if event.finish is not None:
                self.ended[event.number] = event.finish

    def places(self) -> Slots:
        return SlotCaches(ROWS, 3)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """A greedy sequence's fork must go on as the sequence does; others may draw anew."""
        number = data.draw(st.sampled_from(sorted(self.made)))
        (prompt, sampling, place), sequences = self.asked[number], len(self.engine.requests)
        try:
            other = self.engine.fork(number, place=place)
        except (UsageError, PoolExhaustedError):
            assert len(self.engine.requests) == sequences
            return
        greedy = sampling if sampling.temperature == 0 else None
        self.asked[other] = (prompt, greedy or sampling, place)
        self.before[other] = len(self.made[number]) + self.before.get(number, 0)
        self.made[other] = []

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([request.number for request in self.engine.requests]))
        assert self.engine.abort(number) and not self.engine.abort(number)

    @invariant()
    def each_says_what_it_says_alone(self) -> None:
        for number, made in self.made.items():
            wanted, told = alone(*self.asked[number]), self.before.get(number, 0)
            if told and self.asked[number][1].temperature > 0:
                continue  # draws of its own
            assert made == wanted[told : told + len(made)]
            if self.ended.get(number) in ("stop", "length", "context"):
                assert made == wanted[told:]
        taken = 3 - self.engine.slots.free_slots
        assert 0 <= taken <= 3

    def teardown(self) -> None:
        while self.engine.busy:
            self.step()
        assert self.engine.slots.free_slots == 3 and set(self.ended) == set(self.asked)


class JoiningPages(Joining):
    """The same over a pool that holds not even two sequences of full length; free pages are NaN."""

    def places(self) -> Slots:
        return paged(3, 5)

    def teardown(self) -> None:
        super().teardown()
        assert isinstance(self.engine.slots, PagedSlots)
        assert self.engine.slots.cache.free_pages == 5


TestJoining = Joining.TestCase
TestJoiningPages = JoiningPages.TestCase
for case in (TestJoining, TestJoiningPages):
    case.settings = settings(
        max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.parametrize("pages", [None, 9])
def test_an_engine_lives_through_a_thousand_operations(pages: int | None) -> None:
    """Join, step, fork, abort at random; every greedy sequence, a fork or not, says what it says alone."""
    draw = random.Random(3)
    slots: Slots = SlotCaches(ROWS, 5) if pages is None else paged(5, pages)
    running, _ = engine(slots, budget=4)
    asked, made, told, forks = dict[int, tuple[list[int], Sampling]](), dict[int, list[int]](), dict[int, int](), 0
    for _ in range(1000):
        match draw.choices(("join", "step", "fork", "abort"), (3, 6, 2, 1))[0]:
            case "join" if len(running.requests) < 12:
                prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, CONTEXT))]
                sampling = Sampling(max_new_tokens=draw.randint(1, 6), stop_ids=(0,))
                number = running.submit(prompt, sampling)
                asked[number], made[number], told[number] = (prompt, sampling), [], 0
            case "fork" if running.requests:
                origin = draw.choice(running.requests).number
                try:
                    number = running.fork(origin)
                except (UsageError, PoolExhaustedError):
                    continue
                asked[number], made[number] = asked[origin], []
                told[number], forks = told[origin] + len(made[origin]), forks + 1
            case "abort" if running.requests:
                running.abort(draw.choice(running.requests).number)
            case _:
                for event in running.step():
                    made[event.number] += [] if event.token is None else [event.token]
                    wanted = alone(*asked[event.number])[told[event.number] :]
                    assert made[event.number] == wanted[: len(made[event.number])]
                    assert event.finish in (None, "aborted") or made[event.number] == wanted
    drain(running)
    assert forks > 20 and slots.free_slots == 5
    if isinstance(slots, PagedSlots):
        slots.cache.check()
        assert slots.cache.free_pages == pages


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]])
    sampling = Sampling(temperature=0.7, top_k=4, top_p=0.99, seed=1)
    likely, tokens = distribution(logits, *(torch.tensor([x]) for x in (0.7, 4, 0.99)))
    wanted = torch.zeros(5).double().scatter(0, tokens[0], likely[0])
    assert wanted[4] == 0 and wanted.sum() == pytest.approx(1)
    draws, count = Draws(1, 0), 4000
    seen = torch.bincount(torch.tensor([choose(logits, [sampling], [draws])[0] for _ in range(count)]), minlength=5)
    kept = wanted > 0
    chi = ((seen[kept] - count * wanted[kept]) ** 2 / (count * wanted[kept])).sum()
    assert seen[~kept].sum() == 0 and chi < 16.3  # 0.1 % for three degrees of freedom


def test_top_p_keeps_the_fewest_that_reach_it_and_always_one() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]]))
    for top_p, kept in ((0.1, 1), (0.5, 1), (0.51, 2), (0.81, 3), (1.0, 3)):
        likely, _ = distribution(logits, torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.tensor([top_p]))
        assert int((likely > 0).sum()) == kept, top_p


def test_greedy_and_drawn_rows_share_a_batch() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    greedy, drawn = Sampling(), Sampling(temperature=1.0, seed=2)
    together = choose(logits, [greedy, drawn, greedy], [Draws(0, 0), Draws(2, 1), Draws(0, 2)])
    assert together[0] == logits[0].argmax() and together[2] == logits[2].argmax()
    assert together[1] == choose(logits[1:2], [drawn], [Draws(2, 1)])[0]


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}])
def test_samplings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        replace(Sampling(), **wrong)


def test_text_comes_in_whole_characters() -> None:
    data = "né€".encode()
    stream = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    pieces = [stream.add(byte) for byte in data]
    assert pieces == ["n", "", "é", "", "", "€"] and stream.end() == ""
    cut = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    assert cut.add(data[1]) == "" and cut.end() == "�"
