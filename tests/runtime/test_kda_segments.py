"""KDA over stretches of a sequence on several ranks is KDA over the sequence."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimigraph.ir.reference.kda_prefill import kda_prefill
from kimigraph.ir.reference.short_conv import short_conv
from kimigraph.runtime.parallel.collectives import in_lock_step
from kimigraph.runtime.parallel.kda_segments import Stretch, compose, convolution_window, over_stretches, summary

ROWS, HEADS, KEYS, VALUES = 2, 3, 4, 5


def sequence(tokens: int) -> Stretch:
    """Random raw projections; the gate decays between 0.05 and 1."""
    shape = (ROWS, tokens, HEADS)
    gate = -3 * torch.rand(*shape, KEYS, dtype=torch.float64)
    q, k, v = (torch.randn(*shape, size, dtype=torch.float64) for size in (KEYS, KEYS, VALUES))
    return Stretch(q, k, v, gate, torch.rand(shape, dtype=torch.float64))


def prefill(*operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference, with normalised queries and keys."""
    return kda_prefill(*operands, scale=KEYS**-0.5, l2_norm=True)


def cut(whole: Stretch, sizes: list[int]) -> list[Stretch]:
    """Stretches of these lengths, in order."""
    parts = [tensor.split(sizes, dim=1) for tensor in (whole.q, whole.k, whole.v, whole.g, whole.beta)]
    return [Stretch(*tensors) for tensors in zip(*parts, strict=True)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 2**31))
def test_stretches_compute_what_the_sequence_does(sizes: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    tokens = sum(sizes)
    whole, state = sequence(tokens), torch.randn(ROWS, HEADS, KEYS, VALUES)
    ranks: list[Any] = [over_stretches(part, state, rank, prefill) for rank, part in enumerate(cut(whole, sizes))]
    results, sent = in_lock_step(ranks)
    out = torch.cat([result[0] for result in results], dim=1)
    wanted, final = (whole.v, state) if tokens == 0 else prefill(whole.q, whole.k, whole.v, whole.g, whole.beta, state)
    assert torch.allclose(out.float(), wanted.float(), atol=1e-5)
    assert all(torch.allclose(result[1], final, atol=1e-5) for result in results)
    assert sent == len(sizes) * ROWS * HEADS * KEYS * (KEYS + VALUES) * 4  # whatever the lengths are


def test_adding_up_final_states_would_be_wrong() -> None:
    torch.manual_seed(0)
    first, second = cut(sequence(8), [4, 4])
    (_, one), (transition, two) = summary(first, prefill), summary(second, prefill)
    _, _, final = compose(
        torch.zeros(ROWS, HEADS, KEYS, VALUES), torch.stack([transition] * 2), torch.stack([one, two])
    )
    assert (final - (one + two)).abs().max() > 0.1


@pytest.mark.parametrize("sizes", [[5, 4], [1, 1, 1, 1], [0, 2, 0, 7], [9]])
def test_windows_of_convolutions_cross_ranks(sizes: list[int]) -> None:
    torch.manual_seed(0)
    channels, width = 6, 4
    inputs, window = torch.randn(ROWS, sum(sizes), channels), torch.randn(ROWS, channels, width - 1)
    convolve = partial(short_conv, weight=torch.randn(channels, width), activation=True)
    wanted, final = convolve(inputs, initial_state=window)
    parts = inputs.split(sizes, dim=1)
    ranks: list[Any] = [convolution_window(part, window, rank) for rank, part in enumerate(parts)]
    results, _ = in_lock_step(ranks)
    found = [convolve(part, initial_state=before)[0] for part, (before, _) in zip(parts, results, strict=True)]
    assert torch.allclose(torch.cat(found, dim=1), wanted, atol=1e-6)
    assert all(torch.equal(behind, final) for _, behind in results)
