import math

import pytest
import torch

from kimigraph.ir.seeded import checksum, same_checksum, seeded_tensor


def test_a_tensor_depends_on_its_name_and_the_seed():
    first = seeded_tensor("w", (4, 5), torch.float32, "weight")
    assert torch.equal(first, seeded_tensor("w", (4, 5), torch.float32, "weight"))
    assert not torch.equal(first, seeded_tensor("v", (4, 5), torch.float32, "weight"))
    assert not torch.equal(first, seeded_tensor("w", (4, 5), torch.float32, "weight", seed=1))


def test_the_numbers_themselves_do_not_change():
    """Printed scripts of different days must agree."""
    want = [-0.72021723, -0.18905988, 0.28269079]
    torch.testing.assert_close(seeded_tensor("x", (3,), torch.float32), torch.tensor(want), rtol=0, atol=1e-6)


def test_scales_by_kind_and_name():
    assert seeded_tensor("w", (200, 64), torch.float32, "weight").std().item() == pytest.approx(1 / 8, rel=0.05)
    norm = seeded_tensor("layers.0.norm.weight", (2000,), torch.float32, "weight")
    assert norm.mean().item() == pytest.approx(1, abs=0.02) and norm.std().item() == pytest.approx(0.1, rel=0.1)
    bias = seeded_tensor("k_norm.bias", (2000,), torch.float32, "weight")
    assert bias.mean().item() == pytest.approx(0, abs=0.02) and bias.std().item() == pytest.approx(0.1, rel=0.1)
    rate = seeded_tensor("self_attn.A_log", (2000,), torch.float32, "weight")
    assert 0 <= rate.min() and rate.max() < 1 and rate.mean().item() == pytest.approx(0.5, abs=0.05)
    assert seeded_tensor("cache.0.latent", (2000,), torch.float32, "cache").std().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_integers_stay_in_their_range(dtype):
    values = seeded_tensor("ids", (500,), dtype, value_range=(3, 7))
    assert values.dtype == dtype and values.unique().tolist() == [3, 4, 5, 6]
    assert seeded_tensor("ids", (4,), dtype, value_range=(5, 5)).tolist() == [5] * 4
    assert seeded_tensor("mask", (2, 2), torch.bool).all()


def test_a_checksum_tells_sum_order_and_sign():
    x = torch.randn(50)
    total, magnitudes, dot = checksum("out", x)
    assert total == pytest.approx(x.double().sum().item()) and magnitudes == pytest.approx(
        x.double().abs().sum().item()
    )
    assert checksum("out", x.flip(0))[2] != pytest.approx(dot)
    assert checksum("other", x)[2] != pytest.approx(dot)
    assert checksum("out", -x)[0] == pytest.approx(-total)


def test_masked_entries_count_as_zero():
    x = torch.tensor([1.0, -math.inf, math.nan, -3e38, 2.0])
    assert checksum("out", x) == checksum("out", torch.tensor([1.0, 0, 0, 0, 2.0]))


def test_agreement_is_relative_to_the_magnitudes():
    assert same_checksum([0.001, 100.0, 5.0], [0.0, 100.0, 5.0], 1e-4)
    assert not same_checksum([0.1, 100.0, 5.0], [0.0, 100.0, 5.0], 1e-4)
    assert not same_checksum([0.0, 100.0, 5.1], [0.0, 100.0, 5.0], 1e-4)
    assert same_checksum([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0.0)


def test_a_weight_without_columns_has_no_numbers():
    assert seeded_tensor("w", (8, 0), torch.float32, "weight", 0).shape == (8, 0)
