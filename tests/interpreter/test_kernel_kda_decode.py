"""The KDA step's kernel against the fp32 reference: output, state and convolution state."""

import math

import pytest
import torch

from kimigraph.ir.reference.kda_decode import kda_decode as reference

OPERANDS = (
    "qkv", "conv_weight", "conv_state", "gate", "dt_bias", "a_log", "beta", "state", "out_gate", "norm_weight",
)  # fmt: skip
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}  # of the norm
LAYOUTS = ("kv", "vk")


def operands_of(
    seed,
    batch=2,
    tokens=1,
    heads=2,
    key_dim=8,
    value_dim=12,
    width=4,
    columns=None,
    layout="vk",
    dtype=torch.float32,
    state_dtype=torch.float32,
):
    generator = torch.Generator().manual_seed(seed)
    channels = heads * (2 * key_dim + value_dim)
    columns = width - 1 if columns is None else columns

    def normal(*shape, of=dtype):
        return torch.randn(*shape, generator=generator).to(of)

    state = normal(batch, heads, *((key_dim, value_dim) if layout == "kv" else (value_dim, key_dim)), of=state_dtype)
    conv_state = normal(batch, channels, columns)
    # Columns that a convolution of this width never reads.
    conv_state[..., : max(columns - width + 1, 0)] = math.nan
    return {
        "qkv": normal(batch, tokens, channels),
        "conv_weight": normal(channels, width),
        "conv_state": conv_state,
        "gate": normal(batch, tokens, heads * key_dim),
        "dt_bias": normal(heads * key_dim, of=torch.float32),
        "a_log": normal(heads, of=torch.float32) * 0.5,
        "beta": normal(batch, tokens, heads),
        "state": state,
        "out_gate": normal(batch, tokens, heads, value_dim),
        "norm_weight": normal(value_dim),
    }


def attributes_of(layout="vk", lower_bound=None):
    return {"scale": 0.35, "l2_eps": 1e-6, "lower_bound": lower_bound, "norm_eps": 1e-5, "state_layout": layout}


def clone(operands):
    """Copies with the same strides, so that the two runs do not share the states that they change."""
    copies = {}
    for name, tensor in operands.items():
        copies[name] = (
            None
            if tensor is None
            else torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
        )
    return copies


def run(kernel, device, operands, attributes):
    """Output, state and convolution state of the kernel; the operands stay as they are."""
    copies = {name: on(device, tensor) for name, tensor in clone(operands).items()}
    module = kernel("kda_decode", copies, attributes)
    out = module.launch(*(copies[name] for name in OPERANDS))
    return out.cpu(), copies["state"].cpu(), copies["conv_state"].cpu()


def on(device, tensor):
    if tensor is None or device == "cpu":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def agree(result, operands, attributes):
    copies = clone(operands)
    wanted = reference(**copies, **attributes)
    out, state, conv_state = result
    assert out.dtype == wanted.dtype and out.shape == wanted.shape and out.is_contiguous()
    assert error(out, wanted) < TOLERANCE[out.dtype]
    assert error(state, copies["state"]) < TOLERANCE[state.dtype]
    assert torch.equal(conv_state.nan_to_num(7.5), copies["conv_state"].nan_to_num(7.5))


def error(value, wanted):
    return (value.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_dtypes_layouts_and_gates(kernel, device, dtype, layout, lower_bound):
    operands, attributes = operands_of(1, dtype=dtype, layout=layout), attributes_of(layout, lower_bound)
    agree(run(kernel, device, operands, attributes), operands, attributes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(1, 1), (16, 16), (24, 40), (128, 128)])
def test_head_sizes(kernel, device, layout, key_dim, value_dim):
    """Equal sides too, where exchanged layouts would fit."""
    operands = operands_of(2, batch=1, key_dim=key_dim, value_dim=value_dim, layout=layout)
    attributes = attributes_of(layout)
    agree(run(kernel, device, operands, attributes), operands, attributes)


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("width", [1, 4, 7])
@pytest.mark.parametrize("spare", [0, 3])
def test_convolution_widths_and_tokens(kernel, device, tokens, width, spare):
    """Steps shorter and longer than the window; states with more columns than the window needs, or none at all."""
    operands = operands_of(3, batch=1, tokens=tokens, width=width, columns=width - 1 + spare)
    attributes = attributes_of()
    agree(run(kernel, device, operands, attributes), operands, attributes)


@pytest.mark.parametrize("absent", [("out_gate",), ("norm_weight",), ("out_gate", "norm_weight")])
def test_optional_operands(kernel, device, absent):
    operands, attributes = operands_of(4, tokens=2) | dict.fromkeys(absent), attributes_of()
    agree(run(kernel, device, operands, attributes), operands, attributes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_that_models_write(kernel, device, dtype):
    """A weight with a middle axis, gates with heads apart or flat, a rate with leading ones."""
    operands = operands_of(5, tokens=2, dtype=dtype)
    operands["conv_weight"] = operands["conv_weight"].unsqueeze(1)
    operands["gate"] = operands["gate"].unflatten(-1, (2, 8))
    operands["a_log"] = operands["a_log"].reshape(1, 1, 2, 1)
    operands["out_gate"] = operands["out_gate"].flatten(2)
    agree(run(kernel, device, operands, attributes_of()), operands, attributes_of())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "rank", "key_dim"), [(1, 16, 8), (3, 5, 12)])
def test_a_gate_of_low_rank(kernel, device, dtype, tokens, rank, key_dim):
    """The gate's logits as a product of a few numbers a token, both operands parts of larger tensors."""
    operands = low_rank(operands_of(16, tokens=tokens, key_dim=key_dim, dtype=dtype), rank)
    placed = {name: on(device, tensor) for name, tensor in clone(operands).items()}
    module = kernel("kda_decode", placed, attributes_of())
    out = module.launch(*placed.values()).cpu()
    agree((out, placed["state"].cpu(), placed["conv_state"].cpu()), operands, attributes_of())


def low_rank(operands, rank):
    """The same with a gate of that rank: ``gate`` [B, S, rank] and ``gate_weight``."""
    generator = torch.Generator().manual_seed(rank)
    batch, tokens, channels = operands["gate"].shape
    low = torch.randn(batch, tokens, 2 * rank, generator=generator)[..., rank:].to(operands["gate"].dtype)
    weight = torch.randn(channels, rank + 3, generator=generator)[:, :rank] * rank**-0.5
    return operands | {"gate": low, "slots": None, "gate_weight": weight.to(operands["gate"].dtype)}


def test_layouts_that_are_not_contiguous(kernel, device):
    operands = operands_of(6, tokens=3)
    for name in ("qkv", "gate", "beta", "conv_weight", "conv_state", "state", "out_gate"):
        operands[name] = operands[name].transpose(0, 1).contiguous().transpose(0, 1)
    operands["conv_state"] = operands["conv_state"].transpose(1, 2).contiguous().transpose(1, 2)
    operands["norm_weight"] = operands["norm_weight"].repeat_interleave(2)[::2]
    agree(run(kernel, device, operands, attributes_of()), operands, attributes_of())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bf16_state(kernel, device, layout):
    operands = operands_of(7, tokens=2, layout=layout, dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    agree(run(kernel, device, operands, attributes_of(layout)), operands, attributes_of(layout))


def test_convolution_state_in_another_precision(kernel, device):
    """New inputs enter the window as they are and the state as its type rounds them."""
    operands = operands_of(8, tokens=3)
    operands["conv_state"] = operands["conv_state"].bfloat16()
    agree(run(kernel, device, operands, attributes_of()), operands, attributes_of())


def test_spare_columns_change_nothing(kernel, device):
    operands = operands_of(9)
    wide = operands | {"conv_state": torch.nn.functional.pad(operands["conv_state"], (3, 0), value=math.nan)}
    out, state, conv_state = run(kernel, device, operands, attributes_of())
    wide_out, wide_state, wide_conv_state = run(kernel, device, wide, attributes_of())
    assert torch.equal(out, wide_out) and torch.equal(state, wide_state)
    assert torch.equal(conv_state, wide_conv_state[..., 3:])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_tokens_at_once_equal_tokens_in_turn(kernel, device, lower_bound):
    operands, attributes = operands_of(10, batch=1, tokens=3), attributes_of(lower_bound=lower_bound)
    out, state, conv_state = run(kernel, device, operands, attributes)
    outs, now = [], operands
    for token in range(3):
        one = {name: operands[name][:, token : token + 1] for name in ("qkv", "gate", "beta", "out_gate")}
        step, now_state, now_conv = run(kernel, device, now | one, attributes)
        now = now | {"state": now_state, "conv_state": now_conv}
        outs.append(step)
    torch.testing.assert_close(torch.cat(outs, dim=1), out)
    torch.testing.assert_close(now["state"], state)
    assert torch.equal(now["conv_state"], conv_state)


def test_states_of_other_slots_stay(kernel, device):
    """States that are slices of a pool: only the slices change, and rows do not depend on one another."""
    operands = operands_of(11, batch=3)
    pools = {name: on(device, torch.full((7, *operands[name].shape[1:]), math.nan)) for name in ("state", "conv_state")}
    on_device = {name: on(device, tensor) for name, tensor in operands.items()}
    for name, pool in pools.items():
        on_device[name] = pool[1:7:2].copy_(operands[name])
    module = kernel("kda_decode", on_device, attributes_of())
    out = module.launch(*(on_device[name] for name in OPERANDS)).cpu()
    agree((out, on_device["state"].cpu(), on_device["conv_state"].cpu()), operands, attributes_of())
    assert all(pool[::2].isnan().all() for pool in pools.values())
    for row in range(3):
        shared = ("conv_weight", "dt_bias", "a_log", "norm_weight")
        alone = {name: tensor if name in shared else tensor[row : row + 1] for name, tensor in operands.items()}
        assert torch.equal(run(kernel, device, alone, attributes_of())[0], out[row : row + 1])


def test_decay_is_a_power_of_e(kernel, device):
    """With nothing written (beta at -inf) a state fades by exp(g), g = lower_bound / 2 at a gate of zero."""
    operands = operands_of(12)
    operands |= {"gate": operands["gate"] * 0, "dt_bias": operands["dt_bias"] * 0, "beta": operands["beta"] - 200}
    _, state, _ = run(kernel, device, operands, attributes_of(lower_bound=-2.0))
    torch.testing.assert_close(state, operands["state"] * math.exp(-1.0))


def test_extreme_gates_stay_finite(kernel, device):
    for lower_bound in (None, -5.0):
        operands = operands_of(13)
        operands["gate"] = torch.where(operands["gate"] > 0, 300.0, -300.0)
        operands["out_gate"] *= 300
        result = run(kernel, device, operands, attributes_of(lower_bound=lower_bound))
        agree(result, operands, attributes_of(lower_bound=lower_bound))
        assert all(part.isfinite().all() for part in result)


def test_many_steps(kernel, device):
    """Ten steps of one kernel; states go from call to call in place, as in decoding."""
    operands, attributes = operands_of(14, batch=1), attributes_of()
    now, expected = {name: on(device, tensor) for name, tensor in clone(operands).items()}, clone(operands)
    module = kernel("kda_decode", now, attributes)
    for step in range(10):
        fresh = operands_of(100 + step, batch=1)
        for name in ("qkv", "gate", "beta", "out_gate"):
            now[name], expected[name] = on(device, fresh[name]), fresh[name]
        out = module.launch(*(now[name] for name in OPERANDS))
        assert error(out.cpu(), reference(**expected, **attributes)) < 1e-5
    assert error(now["state"].cpu(), expected["state"]) < 1e-5
    assert torch.equal(now["conv_state"].cpu(), expected["conv_state"])


@pytest.mark.parametrize("tokens", [1, 3])
def test_slots_of_a_pool(kernel, device, tokens):
    """Rows find their states through slots; a padded row gives zeros; entry 0 and those of nobody stay as they are."""
    operands, slots = operands_of(15, batch=4, tokens=tokens), torch.tensor([5, 0, 2, -1], dtype=torch.int32)
    pooled, live = dict(operands), [0, 2]
    for name in ("state", "conv_state"):
        pooled[name] = torch.full((7, *operands[name].shape[1:]), math.nan)
        pooled[name][[5, 2]] = operands[name][live]
    pooled["slots"] = slots
    placed = {name: on(device, tensor) for name, tensor in clone(pooled).items()}
    module = kernel("kda_decode", placed, attributes_of())
    out = module.launch(*placed.values()).cpu()
    wanted = reference(**pooled, **attributes_of())
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    assert (out[[1, 3]] == 0).all() and (wanted[[1, 3]] == 0).all()
    shared = ("conv_weight", "dt_bias", "a_log", "norm_weight")
    own = {name: tensor if name in shared else tensor[live] for name, tensor in operands.items()}
    found = {name: placed[name].cpu() for name in ("state", "conv_state")}
    agree((out[live], found["state"][[5, 2]], found["conv_state"][[5, 2]]), own, attributes_of())
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, pooled[name], rtol=1e-4, atol=1e-5, equal_nan=True)
        assert tensor[[0, 1, 3, 4, 6]].isnan().all()
