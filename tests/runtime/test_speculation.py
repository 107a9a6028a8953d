"""Rollback, acceptance and drafts by themselves: folds to the bit, counts of every kind, distributions, look-up."""

import pytest
import torch

from kimigraph.ir.descriptors import ConvDescriptor, StateDescriptor
from kimigraph.ir.errors import UsageError
from kimigraph.ir.reference.kda_decode import kda_decode
from kimigraph.ir.reference.kda_replay import kda_replay
from kimigraph.ir.reference.kda_verify import kda_verify
from kimigraph.ir.reference.kda_verify_states import kda_verify_states
from kimigraph.runtime.generation import Request, Sampling
from kimigraph.runtime.generation.sampling import Draws, distribution
from kimigraph.runtime.sequence import SequenceError
from kimigraph.runtime.speculation import (
    DraftLengths,
    NgramDraft,
    ReplayLog,
    Snapshots,
    StateShape,
    accept_greedy,
    accept_sampled,
    likelihoods,
)

HEADS, WIDTH, CHANNELS, TOKENS, ROWS = 2, 8, 48, 4, 3
ATTRIBUTES = {"scale": WIDTH**-0.5, "lower_bound": -5.0, "state_layout": "vk"}
LAYERS = ("0", "2")


def shape(dtype=torch.float32):
    state, conv = StateDescriptor("vk", "float32", HEADS, WIDTH, WIDTH), ConvDescriptor(CHANNELS, 4, 3)
    return StateShape(LAYERS, state, conv, dtype)


def fold(*tensors):
    kda_replay(*tensors, state_layout="vk")


class Layers:
    """The KDA layers of a model with given projections, by way of the operators' references."""

    def __init__(self, dtype=torch.float32, seed=0):
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)
        self.weights = {
            layer: (self.normal(CHANNELS, 4), self.normal(HEADS * WIDTH).float(), self.normal(HEADS).float())
            for layer in LAYERS
        }

    def normal(self, *size):
        return torch.randn(*size, generator=self.generator).to(self.dtype)

    def projections(self, tokens=TOKENS, rows=ROWS):
        sizes = {"qkv": CHANNELS, "gate": HEADS * WIDTH, "beta": HEADS}
        return {layer: {name: self.normal(rows, tokens, size) for name, size in sizes.items()} for layer in LAYERS}

    def operands(self, layer, given, states):
        taps, bias, rate = self.weights[layer]
        conv, state = states[f"state.{layer}.conv"], states[f"state.{layer}.kda"]
        return given["qkv"], taps, conv, given["gate"], bias, rate, given["beta"], state

    def decode(self, given, states, token, rows):
        """One token of some rows, states in place; its outputs. All rows compute: torch sums by the tensor's shape."""
        outs = []
        for layer in LAYERS:
            one = {name: value[:, token : token + 1] for name, value in given[layer].items()}
            own = {name: value.clone() for name, value in states.items()}
            outs.append(kda_decode(*self.operands(layer, one, own), **ATTRIBUTES)[rows])
            for part in ("kda", "conv"):
                states[f"state.{layer}.{part}"][rows] = own[f"state.{layer}.{part}"][rows]
        return torch.stack(outs)

    def verify(self, given, rollback):
        """All tokens of all rows into the log; their outputs."""
        log, outs = rollback.log(ROWS), []
        for layer in LAYERS:
            records = [value for name, value in log.items() if name.split(".")[1] == layer]
            run = kda_verify if isinstance(rollback, ReplayLog) else kda_verify_states
            outs.append(run(*self.operands(layer, given[layer], rollback.states), *records, **ATTRIBUTES))
        rollback.verified(ROWS)
        return torch.stack(outs)


def rollbacks(dtype=torch.float32):
    return ReplayLog(shape(dtype), ROWS, TOKENS, fold), Snapshots(shape(dtype), ROWS, TOKENS)


def same(states, others):
    return all(torch.equal(states[name], others[name]) for name in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [0, 1])
def test_twenty_rounds_leave_what_decoding_leaves(kind, dtype):
    """Every count from none to all, rows apart; what stands in the log from earlier rounds never comes back."""
    rollback, layers = rollbacks(dtype)[kind], Layers(dtype, seed=kind)
    plain = {name: value.clone() for name, value in rollback.states.items()}
    counts = torch.Generator().manual_seed(5)
    for _ in range(20):
        given = layers.projections()
        before = {name: value.clone() for name, value in rollback.states.items()}
        outs = layers.verify(given, rollback)
        assert same(rollback.states, before)
        accepted = torch.randint(0, TOKENS + 1, (ROWS,), generator=counts)
        rollback.commit(accepted)
        for token in range(TOKENS):
            rows = (accepted > token).nonzero().flatten()
            if len(rows):
                assert torch.equal(layers.decode(given, plain, token, rows), outs[:, rows, token : token + 1])
        assert same(rollback.states, plain)


@pytest.mark.parametrize("kind", [0, 1])
def test_counts_come_as_list_tuple_tensor_and_number(kind):
    given = Layers().projections()
    wanted = None
    for accepted in ([2, 2, 2], (2, 2, 2), torch.tensor([2, 2, 2], dtype=torch.int32), torch.tensor([2, 2, 2])):
        rollback = rollbacks()[kind]
        Layers().verify(given, rollback)
        rollback.commit(accepted)
        wanted = wanted or {name: value.clone() for name, value in rollback.states.items()}
        assert same(rollback.states, wanted)
    alone = rollbacks()[kind]
    Layers().verify(given, alone)
    alone.verified(1)
    alone.commit(2)
    for name, value in alone.states.items():
        assert torch.equal(value[0], wanted[name][0]) and not value[1:].any()


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("wrong", [[1, 1], [1.0, 1.0, 1.0], [[1, 1, 1]], 1])
def test_counts_that_fit_no_batch_are_refused_and_change_nothing(kind, wrong):
    rollback = rollbacks()[kind]
    Layers().verify(Layers().projections(), rollback)
    with pytest.raises(SequenceError, match="accepted counts"):
        rollback.commit(wrong)
    assert not any(value.any() for value in rollback.states.values())
    rollback.commit([1, 1, 1])


@pytest.mark.parametrize("kind", [0, 1])
def test_of_counts_longer_than_the_batch_only_its_own_count(kind):
    """Counts padded to all rows: what an earlier round left in the log of the others is not folded once more."""
    rollback, layers = rollbacks()[kind], Layers()
    layers.verify(layers.projections(), rollback)
    rollback.commit([1, 2, 3])
    kept = {name: value.clone() for name, value in rollback.states.items()}
    layers.verify(layers.projections(), rollback)
    rollback.verified(2)
    rollback.commit(torch.tensor([2, 0, 4]))
    for name, value in rollback.states.items():
        assert not torch.equal(value[0], kept[name][0]) and torch.equal(value[1:], kept[name][1:])


@pytest.mark.parametrize("kind", [0, 1])
def test_a_log_is_folded_once_and_an_aborted_round_never_was(kind):
    rollback, layers = rollbacks()[kind], Layers()
    with pytest.raises(SequenceError, match="folded once"):
        rollback.commit([1, 1, 1])
    layers.verify(layers.projections(), rollback)
    rollback.commit([4, 0, 2])
    kept = {name: value.clone() for name, value in rollback.states.items()}
    with pytest.raises(SequenceError, match="folded once"):
        rollback.commit([1, 1, 1])
    layers.verify(layers.projections(), rollback)
    rollback.abort()
    assert same(rollback.states, kept)
    with pytest.raises(SequenceError, match="folded once"):
        rollback.commit([1, 1, 1])


@pytest.mark.parametrize("kind", [0, 1])
def test_a_copy_goes_on_as_its_original_and_a_reset_one_as_a_new_one(kind):
    rollback, layers = rollbacks()[kind], Layers()
    layers.verify(layers.projections(), rollback)
    for refused in (lambda: rollback.copy(0, 1), lambda: rollback.reset(2)):
        with pytest.raises(SequenceError, match="between verification and commit"):
            refused()
    rollback.commit([3, 1, 2])
    rollback.copy(0, 1)
    rollback.reset(2)
    given = layers.projections()
    for projections in given.values():
        for value in projections.values():
            value[1] = value[0]
            value[2] = value[0]
    layers.verify(given, rollback)
    rollback.commit([2, 2, 2])
    fresh = rollbacks()[kind]
    layers.verify(given, fresh)
    fresh.commit([2, 2, 2])
    for name, value in rollback.states.items():
        assert torch.equal(value[0], value[1]) and not torch.equal(value[0], value[2])
        assert torch.equal(value[2], fresh.states[name][2])


def test_replay_holds_and_moves_a_fraction_of_snapshots():
    """Kimi heads in bf16 and seven drafts: checkpoint, convolution and log against a state behind each token."""
    state, conv = StateDescriptor("vk", "float32", 2, 128, 128), ConvDescriptor(768, 4, 3)
    large = StateShape(("0",), state, conv, torch.bfloat16)
    log, snapshots = ReplayLog(large, 4, 8, lambda *tensors: None), Snapshots(large, 4, 8)
    checkpoints = sum(value.numel() * value.element_size() for value in log.states.values())
    eight_states = snapshots.bytes_held - checkpoints
    assert eight_states >= 6.1 * log.bytes_held, "without the sequences' own states, which an index could spare"
    for rollback in (log, snapshots):
        rollback.verified(4)
        rollback.commit([1, 2, 3, 4])
    assert log.bytes_moved == 3 * checkpoints + 2 * (log.bytes_held - checkpoints)
    assert snapshots.bytes_moved == 3 * checkpoints + eight_states
    assert snapshots.bytes_moved >= 3 * log.bytes_moved
    assert checkpoints + eight_states >= 2.4 * log.bytes_moved, "a commit that only moves an index"


def test_recurrent_layers_of_different_shapes_are_refused():
    text = str(StateDescriptor("vk", "float32", 2, 8, 8)), torch.float32
    other = str(StateDescriptor("vk", "float32", 2, 16, 8)), torch.float32
    conv = str(ConvDescriptor(48, 4, 3)), torch.float32
    found = StateShape.of({"state.0.kda": text, "state.0.conv": conv, "cache.1.latent": ("", torch.float32)})
    assert found is not None and found.layers == ("0",)
    assert StateShape.of({}) is None
    with pytest.raises(UsageError, match="one shape"):
        StateShape.of({"state.0.kda": text, "state.0.conv": conv, "state.1.kda": other, "state.1.conv": conv})


def test_greedy_drafts_stay_up_to_the_first_wrong_one():
    logits = torch.zeros(4, 4, 9)
    for row, best in enumerate(([3, 1, 4, 1], [3, 1, 4, 1], [5, 5, 5, 5], [2, 7, 1, 8])):
        logits[row, torch.arange(4), torch.tensor(best)] = 1.0
    drafts = torch.tensor([[3, 1, 4], [3, 2, 4], [5, -1, -1], [-1, -1, -1]])
    found = accept_greedy(logits, drafts)
    assert found.counts.tolist() == [4, 2, 2, 1]
    kept = [found.tokens[row, :count].tolist() for row, count in enumerate(found.counts)]
    assert kept == [[3, 1, 4, 1], [3, 1], [5, 5], [2]]


def chi_square(counts, wanted):
    expected = wanted * counts.sum()
    kept = expected > 0
    assert not counts[~kept].any()
    return float(((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum())


@pytest.mark.parametrize("sure", [True, False])
def test_sampled_tokens_follow_the_models_distribution(sure):
    """Two drafts, certain or drawn from a distribution of their own: the first two tokens, jointly, are the model's."""
    generator, trials, size = torch.Generator().manual_seed(7 + sure), 40_000, 4
    logits = torch.randn(1, 3, size, generator=generator) * 1.5
    sampling = Sampling(temperature=0.8, top_p=0.9)
    likely = likelihoods(logits, [sampling]).expand(trials, -1, -1)
    assert torch.allclose(likely[0].sum(-1), torch.ones(3, dtype=torch.float64)) and (likely[0] == 0).any()
    if sure:
        drafts, proposed = torch.tensor([[1, 2]]).expand(trials, -1), None
    else:
        proposed = torch.softmax(torch.randn(2, size, generator=generator), -1).double().expand(trials, -1, -1)
        drafts = torch.multinomial(proposed[0], trials, replacement=True, generator=generator).t()
    uniform = torch.rand(trials, 3, generator=generator, dtype=torch.float64)
    found = accept_sampled(likely, drafts, uniform, proposed)
    # Where the second token is not there yet, a plain step would draw it; here from the model's second distribution.
    second = torch.multinomial(likely[0, 1], trials, replacement=True, generator=generator)
    second = torch.where(found.counts > 1, found.tokens[:, 1], second)
    counts = torch.bincount(found.tokens[:, 0] * size + second, minlength=size * size).double()
    wanted = (likely[0, 0].unsqueeze(1) * likely[0, 1]).flatten()
    assert chi_square(counts, wanted) < 37.7, "99.9 % point of 15 degrees of freedom"


def test_rows_without_drafts_and_greedy_rows_share_a_batch_of_drawn_ones():
    logits = torch.randn(3, 3, 6, generator=torch.Generator().manual_seed(1))
    samplings = [Sampling(), Sampling(temperature=1.0, top_k=2), Sampling(temperature=0.5)]
    likely = likelihoods(logits, samplings)
    for row, sampling in enumerate(samplings[1:], 1):
        numbers = (torch.tensor([value]) for value in (sampling.temperature, sampling.top_k, sampling.top_p))
        ordered, tokens = distribution(logits[row, :1], *numbers)
        assert torch.allclose(likely[row, 0].gather(-1, tokens[0]), ordered[0])
    best = logits[0].argmax(-1)
    drafts = torch.tensor([[int(best[0]), int(best[1])], [-1, -1], [-1, -1]])
    found = accept_sampled(likely, drafts, torch.full((3, 3), 0.999999, dtype=torch.float64))
    assert found.counts.tolist() == [3, 1, 1] and found.tokens[0].tolist() == best.tolist()


def request(number, prompt, tokens=()):
    return Request(number, tuple(prompt), Sampling(), Draws(0, 0), frozenset(), list(tokens))


def test_ngrams_propose_what_followed_the_longest_run_seen_last():
    draft = NgramDraft(longest=3, shortest=2)
    running = {
        0: request(1, [1, 2, 3, 9, 7, 2, 3, 8, 5], [1, 2, 3]),
        1: request(2, [4, 5, 6, 4], [5]),
        2: request(3, [1, 2, 3, 4], [5]),
    }
    assert draft.propose(3, running, 4) == {0: [9, 7, 2, 3], 1: [6, 4, 5]}
    running[0].tokens += [9, 7]
    running[1].tokens += [6]
    assert draft.propose(3, running, 2) == {0: [2, 3], 1: [4, 5]}
    assert draft.propose(3, {1: request(4, [9, 9, 9])}, 2) == {1: [9]}


def test_a_sequence_gets_as_many_drafts_as_its_own_history_makes_worth_while():
    lengths, right, wrong = DraftLengths(6), request(1, [1], [2]), request(2, [1], [2])
    assert lengths.wanted({0: right, 1: wrong}) == {0: 6, 1: 6}, "nothing is known yet"
    for _ in range(12):
        lengths.observe(right, 6, 6)
        lengths.observe(wrong, 6, 0)
    assert lengths.wanted({0: right, 1: wrong}) == {0: 6, 1: 0}
    wrong.tokens += [3] * 7
    assert lengths.wanted({3: wrong}) == {3: 1}, "tried again at every eighth token"
    assert lengths.wanted({0: right}) == {0: 6}, "who left and came back is as a new one"
    half = request(3, [1], [2])
    for _ in range(40):
        lengths.observe(half, 2, 1)
    assert 1 <= lengths.wanted({0: half})[0] <= 3, "one of two stays: 0.5 ** 2 is above the least chance"
    lengths.observe(half, 0, 0)
