"""Decoding whose states are written with every L-th token: against the reference, and to the bit against decoding."""

import pytest
import torch

from kimigraph.ir.reference.kda_decode_logged import kda_decode_logged

LENGTH, STATES = 3, ("conv_state", "state")


def operands_of(seed, batch=3, heads=2, key_dim=8, value_dim=12, layout="vk", dtype=torch.float32, length=LENGTH):
    """Operands of a step, and a log of NaN that nothing is in."""
    generator = torch.Generator().manual_seed(seed)
    channels = heads * (2 * key_dim + value_dim)

    def normal(*shape, of=dtype):
        return torch.randn(*shape, generator=generator).to(of)

    def log(width):
        return torch.full((batch, length, heads, width), torch.nan)

    last = (key_dim, value_dim) if layout == "kv" else (value_dim, key_dim)
    return {
        "qkv": normal(batch, 1, channels),
        "conv_weight": normal(channels, 4),
        "conv_state": normal(batch, channels, 3),
        "gate": normal(batch, 1, heads * key_dim),
        "dt_bias": normal(heads * key_dim, of=torch.float32),
        "a_log": normal(heads, of=torch.float32) * 0.5,
        "beta": normal(batch, 1, heads),
        "state": normal(batch, heads, *last, of=torch.float32),
        "keys": log(key_dim),
        "decays": log(key_dim),
        "deltas": log(value_dim),
        "filled": torch.zeros(batch, dtype=torch.int32),
        "out_gate": normal(batch, 1, heads, value_dim),
        "norm_weight": normal(value_dim),
    }


def attributes_of(layout="vk", lower_bound=-5.0):
    return {"scale": 0.35, "l2_eps": 1e-6, "lower_bound": lower_bound, "norm_eps": 1e-5, "state_layout": layout}


def plain(operands):
    """What ``kda_decode`` takes of them, with states of its own."""
    names = ("keys", "decays", "deltas", "filled")
    found = {name: tensor for name, tensor in operands.items() if name not in names}
    return found | {name: found[name].clone() for name in ("conv_state", "state")}


def on(device, operands):
    return {name: tensor.to(device) for name, tensor in operands.items()}


def step_inputs(operands, step):
    """New projections of a step, put where the old ones are."""
    generator = torch.Generator().manual_seed(100 + step)
    for name in ("qkv", "gate", "beta", "out_gate"):
        operands[name].copy_(torch.randn(operands[name].shape, generator=generator))


def compare(kernel, operands, attributes, target, steps, exact=True):
    """Decode both ways; row r joins at step r, so that rows write their states at different steps."""
    length, other = operands["keys"].shape[1], plain(operands)
    logged = kernel("kda_decode_logged", operands, attributes, target=target)
    decode = kernel("kda_decode", other, attributes, target=target)
    joins = torch.arange(operands["qkv"].shape[0], device=operands["qkv"].device) % length
    written = 0
    for step in range(steps):
        step_inputs(operands, step)
        for name in ("qkv", "gate", "beta", "out_gate"):
            other[name].copy_(operands[name])
        waits = joins > step
        before = [(tensors, {name: tensors[name].clone() for name in STATES}) for tensors in (operands, other)]
        out, wanted = logged.launch(*operands.values()), decode.launch(*other.values())
        for tensors, kept in before:
            for name, tensor in kept.items():
                tensors[name][waits] = tensor[waits]
        torch.testing.assert_close(out[~waits], wanted[~waits])
        assert torch.equal(operands["conv_state"], other["conv_state"])
        operands["filled"][~waits] = (operands["filled"][~waits] + 1) % length
        full = ~waits & (operands["filled"] == 0)
        written += int(full.sum())
        if exact:
            assert torch.equal(operands["state"][full], other["state"][full])
        torch.testing.assert_close(operands["state"][full], other["state"][full], rtol=1e-5, atol=1e-5)
    assert written >= (steps // length - 1) * len(joins)


@pytest.fixture
def target():
    return "cpu"


@pytest.mark.parametrize(("dtype", "layout"), [(torch.float32, "vk"), (torch.bfloat16, "kv")])
def test_states_are_those_of_decoding_to_the_bit_whenever_they_are_written(kernel, device, target, dtype, layout):
    """The log wraps twice; NaN of a log's unused places would come through."""
    operands = on(device, operands_of(1, heads=1, layout=layout, dtype=dtype))
    compare(kernel, operands, attributes_of(layout), target, 2 * LENGTH + 1, exact=layout == "vk" or device == "cpu")


def test_a_log_of_one_is_decoding(kernel, device, target):
    compare(kernel, on(device, operands_of(2, batch=2, heads=1, length=1)), attributes_of(lower_bound=None), target, 2)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (24, 40)])
def test_the_kernel_agrees_with_its_reference(kernel, device, target, key_dim, value_dim):
    operands = operands_of(3, batch=4, key_dim=key_dim, value_dim=value_dim)
    for name in ("keys", "decays", "deltas"):
        operands[name] = torch.rand(operands[name].shape, generator=torch.Generator().manual_seed(4))
    operands["filled"] = torch.tensor([0, 1, 2, 1], dtype=torch.int32)
    operands = on(device, operands)
    wanted = {name: tensor.clone() for name, tensor in operands.items()}
    out = kernel("kda_decode_logged", operands, attributes_of(), target=target).launch(*operands.values())
    expected = kda_decode_logged(*wanted.values(), **attributes_of())
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for name in ("conv_state", "state", "keys", "decays", "deltas"):
        torch.testing.assert_close(operands[name], wanted[name], rtol=1e-5, atol=1e-5)
