"""``kimigraph bench moe``: its fp64 reference, torch's way and the operator's reference are one computation."""

import pytest
import torch

from kimigraph.bench import moe
from kimigraph.ir.errors import UsageError
from kimigraph.ir.reference.moe_experts import moe_experts

SIZES = {"WIDTH": 32, "INNER": 16, "OUTER": 24, "EXPERTS": 16, "PICKS": 4}


@pytest.fixture
def given(monkeypatch):
    for name, size in SIZES.items():
        monkeypatch.setattr(moe, name, size)
    monkeypatch.setitem(moe.ATTRIBUTES, "picks", SIZES["PICKS"])
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator).bfloat16()

    shapes = {
        "x": (9, 32), "logits": (9, 16), "bias": (16,), "gate_up": (16, 32, 32), "down": (16, 32, 16),
        "norm_weight": (32,), "up": (24, 32), "shared_gate": (9, 16), "shared_up": (9, 16), "shared_down": (24, 16),
    }  # fmt: skip
    made = {name: normal(*shape) for name, shape in shapes.items()}
    return made | {name: made[name].float() for name in ("logits", "bias")}


@pytest.mark.parametrize("follows", [True, False])
def test_the_reference_of_the_gate_is_the_operator(given, follows):
    operands = given if follows else given | dict.fromkeys(moe.NAMES)
    wanted, _ = moe_experts(*operands.values(), **moe.ATTRIBUTES)
    torch.testing.assert_close(
        moe.exact(operands, given["logits"]).float(), wanted.float(), rtol=1e-2, atol=1e-2 * float(wanted.abs().max())
    )


def test_torchs_way_computes_the_experts(given):
    found = moe.grouped(given, given["logits"]).double()
    wanted = moe.exact(given | dict.fromkeys(moe.NAMES), given["logits"])
    assert float((found - wanted).norm() / wanted.norm()) < 1e-2


def test_it_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="needs an NVIDIA GPU"):
        moe.run(("decode",), False, print)


def test_a_line_says_the_ratios():
    times = {"experts": {"median": 204.0}}
    row = {"tokens": 64, "us": times, "of_floor": 0.93, "floor_us": 189.8, "ratio": {"torch": 2.29}}
    assert moe.line(row) == "N    64: experts 204.0 us; 93% of the floor 189.8, 2.29 of torch"
