"""The short convolution's kernel against its reference: outputs and the inputs handed on."""

import math

import pytest
import torch

from kimigraph.ir.reference.short_conv import short_conv as reference


def operands_of(seed, tokens=21, batch=2, channels=40, width=4, columns=3, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    state = None
    if columns is not None:
        state = normal(batch, channels, columns).to(dtype)
        state[..., : max(columns - width + 1, 0)] = math.nan  # columns that this width never reads
    return {
        "x": normal(batch, tokens, channels).to(dtype),
        "weight": normal(channels, 1, width),
        "initial_state": state,
    }


def check(kernel, device, operands, activation=True):
    placed = {name: None if tensor is None else tensor.to(device) for name, tensor in operands.items()}
    module = kernel("short_conv", placed, {"activation": activation})
    y, final = (tensor.cpu() for tensor in module.launch(*placed.values()))
    wanted_y, wanted_final = reference(**operands, activation=activation)
    assert y.dtype == wanted_y.dtype and y.shape == wanted_y.shape
    assert final.dtype == wanted_final.dtype and torch.equal(final, wanted_final)
    tolerance = 1e-5 if y.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y, wanted_y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [True, False])
def test_dtypes(kernel, device, dtype, activation):
    check(kernel, device, operands_of(1, dtype=dtype), activation)


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 16, 33])
@pytest.mark.parametrize("columns", [None, 3, 5])
def test_runs_shorter_and_longer_than_the_window(kernel, device, tokens, columns):
    check(kernel, device, operands_of(2, tokens=tokens, columns=columns))


@pytest.mark.parametrize("width", [1, 2, 7])
def test_widths(kernel, device, width):
    check(kernel, device, operands_of(3, width=width, columns=width - 1))


def test_more_channels_than_a_tile(kernel, device):
    check(kernel, device, operands_of(4, tokens=18, channels=300, batch=1))


def test_layouts_that_are_not_contiguous(kernel, device):
    operands = operands_of(5)
    operands["x"] = operands["x"].transpose(1, 2).contiguous().transpose(1, 2)
    operands["initial_state"] = operands["initial_state"].transpose(1, 2).contiguous().transpose(1, 2)
    check(kernel, device, operands)


def test_a_state_in_another_precision(kernel, device):
    operands = operands_of(6, tokens=2)
    operands["initial_state"] = operands["initial_state"].bfloat16()
    check(kernel, device, operands)
