"""Kernels that verify drafts and fold what was accepted: against the references, and to the bit against decoding."""

import pytest
import torch

from kimigraph.ir.reference.kda_replay import kda_replay as fold
from kimigraph.ir.reference.kda_verify import kda_verify
from kimigraph.ir.reference.kda_verify_states import kda_verify_states

TOKENS = 4


def operands_of(seed, layers=1, batch=3, tokens=TOKENS, heads=2, key_dim=8, value_dim=12, layout="vk", dtype=None):
    """Operands of a step of ``layers`` layers, each as ``kda_decode`` takes them but stacked."""
    generator = torch.Generator().manual_seed(seed)
    dtype, channels = dtype or torch.float32, heads * (2 * key_dim + value_dim)

    def normal(*shape, of=dtype):
        return torch.randn(layers, *shape, generator=generator).to(of)

    last = (key_dim, value_dim) if layout == "kv" else (value_dim, key_dim)
    return {
        "qkv": normal(batch, tokens, channels),
        "conv_weight": normal(channels, 4),
        "conv_state": normal(batch, channels, 3),
        "gate": normal(batch, tokens, heads * key_dim),
        "dt_bias": normal(heads * key_dim, of=torch.float32),
        "a_log": normal(heads, of=torch.float32) * 0.5,
        "beta": normal(batch, tokens, heads),
        "state": normal(batch, heads, *last, of=torch.float32),
        "out_gate": normal(batch, tokens, heads, value_dim),
        "norm_weight": normal(value_dim),
    }


def attributes_of(layout="vk", lower_bound=-5.0):
    return {"scale": 0.35, "l2_eps": 1e-6, "lower_bound": lower_bound, "norm_eps": 1e-5, "state_layout": layout}


def empty_log(operands, layout="vk"):
    """The log of a stack of layers, filled with NaN."""
    layers, batch, tokens, channels = operands["qkv"].shape
    _, _, heads, *last = operands["state"].shape
    key_dim, value_dim = last if layout == "kv" else reversed(last)
    device = operands["qkv"].device
    log = {
        name: torch.full((layers, batch, tokens, heads, width), torch.nan, device=device)
        for name, width in (("keys", key_dim), ("decays", key_dim), ("deltas", value_dim))
    }
    kind = operands["conv_state"].dtype
    return log | {"inputs": torch.full((layers, batch, tokens, channels), torch.nan, dtype=kind, device=device)}


def layer(operands, number, token=None):
    """The operands of one layer; of one token alone where one is named."""
    found = {name: tensor[number] for name, tensor in operands.items()}
    if token is not None:
        per_token = ("qkv", "gate", "beta", "out_gate")
        found |= {name: found[name][:, token : token + 1].contiguous() for name in per_token}
    return found


def verify(kernel, operands, log, number, attributes, target):
    """Run the kernel on one layer, its records going into the log."""
    own, records = layer(operands, number), layer(log, number)
    last = {name: own.pop(name) for name in ("out_gate", "norm_weight")}
    tensors = own | records | last
    return kernel("kda_verify", tensors, attributes, target=target).launch(*tensors.values())


def decoded(kernel, operands, counts, attributes, target):
    """States after ``counts[row]`` tokens of decoding, token by token, and the outputs of all tokens."""
    states, convs, outs = operands["state"].clone(), operands["conv_state"].clone(), []
    for number in range(operands["qkv"].shape[0]):
        row = []
        own = layer(operands, number, 0)
        now = {"state": own["state"].clone(), "conv_state": own["conv_state"].clone()}
        module = kernel("kda_decode", own | now, attributes, target=target)
        for token in range(operands["qkv"].shape[2]):
            out = module.launch(*(layer(operands, number, token) | now).values())
            row.append(out)
            for place, count in enumerate(counts):
                if count == token + 1:
                    states[number, place] = now["state"][place]
                    convs[number, place] = now["conv_state"][place]
        outs.append(torch.cat(row, 1))
    return states, convs, torch.stack(outs)


def replay(kernel, operands, log, counts, layout, target):
    """Fold into copies of the states; returns them."""
    tensors = {name: operands[name].clone() for name in ("state", "conv_state")} | log
    tensors["accepted"] = torch.tensor(counts, dtype=torch.int32, device=log["keys"].device)
    kernel("kda_replay", tensors, {"state_layout": layout}, target=target).launch(*tensors.values())
    return tensors["state"], tensors["conv_state"]


def same_states(found, wanted, layout):
    """To the bit; on a GPU, where states are [.., K, V], to rounding: keys are summed in several orders there."""
    if layout == "vk" or found[0].device.type == "cpu":
        assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(found[1], wanted[1])


@pytest.fixture
def target():
    return "cpu"


def on(device, operands):
    return {name: tensor.to(device) for name, tensor in operands.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["kv", "vk"])
@pytest.mark.parametrize("counts", [(0, 1, 2), (4, 3, 4)])
def test_verify_and_fold_are_decoding_to_the_bit(kernel, device, target, dtype, layout, counts):
    """Every accepted count, from none to all, in two layers of one launch; rows are apart from one another."""
    operands = on(device, operands_of(1, layers=2, layout=layout, dtype=dtype))
    attributes, log = attributes_of(layout), empty_log(operands, layout)
    before = {name: operands[name].clone() for name in ("state", "conv_state")}
    outs = torch.stack([verify(kernel, operands, log, number, attributes, target) for number in range(2)])
    assert all(torch.equal(operands[name], kept) for name, kept in before.items())
    assert not any(tensor.isnan().any() for tensor in log.values())
    state, conv = replay(kernel, operands, log, counts, layout, target)
    wanted_state, wanted_conv, wanted_outs = decoded(kernel, operands, counts, attributes, target)
    same_states((state, conv), (wanted_state, wanted_conv), layout)
    torch.testing.assert_close(outs, wanted_outs)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (24, 40), (128, 128)])
def test_the_kernels_agree_with_their_references(kernel, device, target, key_dim, value_dim):
    operands = on(device, operands_of(2, batch=2, key_dim=key_dim, value_dim=value_dim))
    log, wanted_log = empty_log(operands), empty_log(operands)
    out = verify(kernel, operands, log, 0, attributes_of(), target)
    own = layer(operands, 0)
    last = {name: own.pop(name) for name in ("out_gate", "norm_weight")}
    wanted = kda_verify(*own.values(), *layer(wanted_log, 0).values(), *last.values(), **attributes_of())
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    for name in log:
        torch.testing.assert_close(log[name], wanted_log[name], rtol=1e-5, atol=1e-5)
    state, conv = replay(kernel, operands, log, (3, 1), "vk", target)
    fold(
        operands["state"],
        operands["conv_state"],
        *wanted_log.values(),
        torch.tensor([3, 1]).to(device),
        state_layout="vk",
    )
    torch.testing.assert_close(state, operands["state"], rtol=1e-5, atol=1e-5)
    assert torch.equal(conv, operands["conv_state"])


@pytest.mark.parametrize("counts", [(-1, 9, 0)])
def test_counts_out_of_range(kernel, device, target, counts):
    """None below zero, all above the log's tokens; an untouched sequence keeps even a NaN."""
    operands = on(device, operands_of(3))
    operands["state"][0, 2] = torch.nan
    log = empty_log(operands)
    verify(kernel, operands, log, 0, attributes_of(), target)
    state, conv = replay(kernel, operands, log, counts, "vk", target)
    most, most_conv = replay(kernel, operands, log, (0, TOKENS, 0), "vk", target)
    assert torch.equal(state.nan_to_num(7.0), most.nan_to_num(7.0)) and torch.equal(conv, most_conv)
    assert torch.equal(state[:, 0], operands["state"][:, 0]) and state[:, 2].isnan().all()


@pytest.mark.parametrize("layout", ["kv", "vk"])
def test_snapshots_hold_the_state_behind_each_token(kernel, device, target, layout):
    operands = on(device, operands_of(4, layout=layout))
    own = layer(operands, 0)
    last = {name: own.pop(name) for name in ("out_gate", "norm_weight")}
    state = own["state"]
    kept = {
        "states": torch.full((state.shape[0], TOKENS, *state.shape[1:]), torch.nan, device=device),
        "inputs": torch.full_like(own["qkv"], torch.nan),
    }
    wanted = {name: tensor.clone() for name, tensor in kept.items()}
    tensors = own | kept | last
    out = kernel("kda_verify_states", tensors, attributes_of(layout), target=target).launch(*tensors.values())
    expected = kda_verify_states(*own.values(), *wanted.values(), *last.values(), **attributes_of(layout))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kept["states"], wanted["states"], rtol=1e-5, atol=1e-5)
    assert torch.equal(kept["inputs"], own["qkv"])
    log = empty_log(operands, layout)
    verify(kernel, operands, log, 0, attributes_of(layout), target)
    for count in range(1, TOKENS + 1):
        folded, conv = replay(kernel, operands, log, (count,) * 3, layout, target)
        same_states((folded[0], conv), (kept["states"][:, count - 1], conv), layout)
