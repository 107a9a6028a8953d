"""Random weights that a device draws itself: of the distributions of the seeded ones, in place, the same every time."""

import pytest
import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.seeded import seeded_tensor
from kimigraph.weights import drawn_weight

CPU = torch.device("cpu")


def spec(source: str, *shape: int, dtype: str = "float32") -> InputSpec:
    stride = tuple(torch.empty(shape, device="meta").stride())
    return InputSpec("weight", "weight", source, shape, stride, dtype)


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ("layers.0.mlp.gate_proj.weight", (300, 400)),
        ("layers.0.mlp.experts.down_proj", (8, 100, 400)),
        ("layers.0.input_layernorm.weight", (30000,)),
        ("layers.0.indexer.k_norm.bias", (30000,)),
        ("layers.0.self_attn.dt_bias", (30000,)),
        ("layers.0.self_attn.A_log", (30000,)),
    ],
)
def test_the_distribution_is_that_of_seeded_weights(source: str, shape: tuple[int, ...]) -> None:
    drawn, seeded = drawn_weight(spec(source, *shape), 0, CPU), seeded_tensor(source, shape, torch.float32, "weight", 0)
    assert drawn.shape == seeded.shape
    spread = seeded.std().item()
    assert drawn.mean().item() == pytest.approx(seeded.mean().item(), abs=0.05 * spread)
    assert drawn.std().item() == pytest.approx(spread, rel=0.05)


def test_name_and_seed_decide_the_values() -> None:
    one, other = spec("a.weight", 4, 6, dtype="bfloat16"), spec("b.weight", 4, 6, dtype="bfloat16")
    assert drawn_weight(one, 1, CPU).dtype == torch.bfloat16
    assert torch.equal(drawn_weight(one, 1, CPU), drawn_weight(one, 1, CPU))
    assert not torch.equal(drawn_weight(one, 1, CPU), drawn_weight(one, 2, CPU))
    assert not torch.equal(drawn_weight(one, 1, CPU), drawn_weight(other, 1, CPU))


def test_strides_are_those_of_the_program() -> None:
    turned = InputSpec("weight", "weight", "a.weight", (4, 6), (1, 4), "float32")
    assert drawn_weight(turned, 0, CPU).stride() == (1, 4)
