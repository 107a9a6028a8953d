"""The kernels of KDA prefill against the fp32 recurrence: outputs, states, packed sequences, decay of any strength."""

import math

import pytest
import torch

from kimigraph.ir.reference.kda_prefill import kda_prefill as reference
from kimigraph.ir.reference.kda_prefill_deltas import kda_prefill_deltas as deltas_reference

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 8e-3}  # of the norm
LAYOUTS = ("kv", "vk")


def operands_of(
    seed,
    tokens=40,
    batch=1,
    heads=2,
    key_dim=8,
    value_dim=12,
    layout="kv",
    dtype=torch.float32,
    raw=False,
    lengths=None,
    floor=None,
):
    """``lengths`` packs sequences; ``raw`` gives logits; ``floor`` bounds the log-decay."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, of=dtype):
        return torch.randn(*shape, generator=generator).to(of)

    tokens = tokens if lengths is None else sum(lengths)
    sequences = batch if lengths is None else len(lengths)
    logits, strength = normal(batch, tokens, heads, key_dim), normal(batch, tokens, heads)
    state = (key_dim, value_dim) if layout == "kv" else (value_dim, key_dim)
    edges = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "q": normal(batch, tokens, heads, key_dim),
        "k": normal(batch, tokens, heads, key_dim),
        "v": normal(batch, tokens, heads, value_dim),
        "g": logits if raw else (-logits.float().abs()).clamp_min(-math.inf if floor is None else floor),
        "beta": strength if raw else strength.float().sigmoid(),
        "initial_state": normal(sequences, heads, *state, of=torch.float32),
        "a_log": normal(heads, of=torch.float32) * 0.5 if raw else None,
        "dt_bias": normal(heads * key_dim, of=torch.float32) if raw else None,
        "cu_seqlens": edges,
    }


def attributes_of(layout="kv", lower_bound=None, l2_norm=True):
    return {"scale": 0.35, "l2_norm": l2_norm, "l2_eps": 1e-6, "lower_bound": lower_bound, "state_layout": layout}


def error(value, wanted):
    return (value.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)


def on(device, operands):
    return {name: None if tensor is None else tensor.to(device) for name, tensor in operands.items()}


def check(kernel, device, operands, attributes, tolerance=None, **options):
    """The kernel's results, after comparing them with the reference's."""
    target = "cpu" if device == "cpu" else "cuda"
    placed = on(device, operands)
    module = kernel("kda_prefill", placed, attributes, target=target, **options)
    out, final = (tensor.cpu() for tensor in module.launch(*placed.values()))
    wanted_out, wanted_final = reference(**operands, **attributes)
    tolerance = TOLERANCE[operands["v"].dtype] if tolerance is None else tolerance
    assert out.dtype == wanted_out.dtype and out.shape == wanted_out.shape and out.is_contiguous()
    assert final.dtype == torch.float32 and final.shape == wanted_final.shape
    assert error(out, wanted_out) < tolerance
    assert error(final, wanted_final) < tolerance
    return out, final


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("raw", [False, True])
def test_gates_and_layouts(kernel, device, layout, lower_bound, raw):
    operands = operands_of(1, layout=layout, raw=raw, floor=lower_bound)
    check(kernel, device, operands, attributes_of(layout, lower_bound))


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 64, 70])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_lengths_around_a_chunk(kernel, device, tokens, lower_bound):
    operands = operands_of(2, tokens=tokens, batch=2, floor=lower_bound)
    check(kernel, device, operands, attributes_of(lower_bound=lower_bound))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (16, 16), (24, 40), (128, 128), (64, 200)])
def test_head_sizes(kernel, device, key_dim, value_dim):
    check(kernel, device, operands_of(3, heads=1, key_dim=key_dim, value_dim=value_dim), attributes_of())


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_bf16(kernel, device, lower_bound):
    operands = operands_of(
        4, key_dim=128, value_dim=128, dtype=torch.bfloat16, raw=True, layout="vk", tokens=66, batch=2
    )
    check(kernel, device, operands, attributes_of("vk", lower_bound))


@pytest.mark.parametrize("lengths", [(5, 0, 35, 33, 0), (0, 32, 32), (1, 1, 1, 1), (64,), (0, 0)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_sequences(kernel, device, lengths, layout):
    """Sequences that begin inside a chunk, end at its edge, or have no token and keep their state."""
    operands = operands_of(5, lengths=lengths, layout=layout, raw=True)
    out, final = check(kernel, device, operands, attributes_of(layout, -5.0))
    for sequence, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(final[sequence], operands["initial_state"][sequence])
    start = sum(lengths[:-1])
    alone = operands | {
        **{name: operands[name][:, start:] for name in ("q", "k", "v", "g", "beta")},
        "initial_state": operands["initial_state"][-1:],
        "cu_seqlens": None,
    }
    if lengths[-1]:
        wanted, _ = check(kernel, device, alone, attributes_of(layout, -5.0))
        assert error(out[:, start:], wanted) < 1e-6


def test_packed_width_of_indices(kernel, device):
    operands = operands_of(6, lengths=(3, 40))
    operands["cu_seqlens"] = operands["cu_seqlens"].long()
    check(kernel, device, operands, attributes_of())


def test_no_initial_state_and_no_norms(kernel, device):
    operands = operands_of(7, tokens=45) | {"initial_state": None}
    operands["k"] = operands["k"] * 8**-0.5
    check(kernel, device, operands, attributes_of(l2_norm=False))


def test_operands_that_are_slices_of_one_tensor(kernel, device):
    operands = operands_of(8, tokens=37, batch=2, value_dim=8)
    packed = torch.cat([operands[name] for name in "qkv"], dim=2)
    operands |= dict(zip("qkv", packed.chunk(3, dim=2), strict=True))
    operands["g"] = operands["g"].transpose(0, 1).contiguous().transpose(0, 1)
    check(kernel, device, operands, attributes_of())


@pytest.mark.parametrize("gate", [-6.0, -300.0, 0.0])
@pytest.mark.parametrize("strength", [0.0, 1.0, 2.0])
def test_strong_and_absent_decay(kernel, device, gate, strength):
    """No factor exp(-G) appears: a decay of -300 a token is as safe as none, and so is a doubled write strength."""
    operands = operands_of(9, tokens=64)
    operands |= {"g": operands["g"] * 0 + gate, "beta": operands["beta"] * 0 + strength}
    out, final = check(kernel, device, operands, attributes_of(), tolerance=2e-5)
    assert out.isfinite().all() and final.isfinite().all()


def test_saturated_bounded_gate(kernel, device):
    """Half of the channels at the bound all the time, the others without decay."""
    operands = operands_of(10, tokens=96, raw=True)
    operands["g"] = torch.where(torch.arange(8) % 2 == 0, 300.0, -300.0).expand(operands["g"].shape).contiguous()
    check(kernel, device, operands, attributes_of(lower_bound=-5.0), tolerance=2e-5)


def test_identical_keys(kernel, device):
    """The chunk's triangular system at its worst: equal keys, strength near one, no decay."""
    operands = operands_of(11, tokens=64, key_dim=16)
    operands |= {"k": operands["k"][:, :1].expand_as(operands["k"]).contiguous(), "g": operands["g"] * 0}
    operands["beta"] = operands["beta"] * 0 + 0.998
    check(kernel, device, operands, attributes_of(), tolerance=2e-5)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_split_anywhere(kernel, device, lower_bound):
    """A run cut in two, the state handed on, is the run."""
    operands, attributes = operands_of(12, tokens=70, floor=lower_bound), attributes_of(lower_bound=lower_bound)
    whole, final = check(kernel, device, operands, attributes)
    for cut in (1, 31, 32, 33, 69):
        names = ("q", "k", "v", "g", "beta")
        head, state = check(kernel, device, operands | {name: operands[name][:, :cut] for name in names}, attributes)
        rest = operands | {name: operands[name][:, cut:] for name in names} | {"initial_state": state}
        tail, last = check(kernel, device, rest, attributes)
        assert error(torch.cat([head, tail], dim=1), whole) < 2e-6
        assert error(last, final) < 2e-6


def test_corrected_deltas(kernel, device):
    """What is written for replay: S_t = exp(g) S_{t-1} + k u^T, token by token."""
    operands, attributes = operands_of(13, tokens=37), attributes_of()
    placed = on(device, operands)
    target = "cpu" if device == "cpu" else "cuda"
    module = kernel("kda_prefill", placed, attributes, target=target, deltas=True)
    deltas = torch.full(operands["v"].shape, math.nan, device=device)
    _, final = module.launch(*placed.values(), deltas=deltas)
    keys = torch.nn.functional.normalize(operands["k"], dim=-1, eps=0)
    state = operands["initial_state"]
    for token in range(37):
        state = state * operands["g"][:, token].exp().unsqueeze(-1)
        state = state + keys[:, token].unsqueeze(-1) * deltas[:, token].cpu().unsqueeze(-2)
    assert error(final.cpu(), state) < 1e-5


def test_initial_state_stays(kernel, device):
    operands, attributes = operands_of(14), attributes_of()
    before = operands["initial_state"].clone()
    check(kernel, device, operands, attributes)
    assert torch.equal(operands["initial_state"], before)


def test_the_operator_with_deltas(kernel, device):
    """``kda_prefill_deltas`` has one result more than ``kda_prefill``."""
    operands, attributes = operands_of(22, tokens=35, raw=True), attributes_of(lower_bound=-5.0)
    placed = on(device, operands)
    module = kernel("kda_prefill_deltas", placed, attributes, target="cpu" if device == "cpu" else "cuda")
    for found, wanted in zip(module.launch(*placed.values()), deltas_reference(**operands, **attributes), strict=True):
        assert found.shape == wanted.shape and error(found.cpu(), wanted) < TOLERANCE[torch.float32]
