"""A row of a batch has the same bits wherever it stands and whatever stands beside it, in every kernel of the compiler.

So a sequence's step does not depend on its neighbours, nor on what was in their rows before.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor

MOE: dict[str, Any] = {
    "picks": 3, "renormalize": True, "scale": 1.3, "groups": 1, "group_picks": 1, "activation": "silu", "beta": 1.0,
    "linear_beta": 1.0, "limit": None, "eps": 1e-5,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An operator's call: operands in schema order, of which ``shared`` ones have no rows; it writes ``written``."""

    op: str
    operands: dict[str, Tensor | None]
    attributes: dict[str, Any]
    shared: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=lambda: {})


class Draw:
    """Seeded numbers of one type, on a device."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype) -> None:
        self.generator, self.device, self.dtype = torch.Generator().manual_seed(seed), device, dtype

    def __call__(self, *shape: int, of: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(of or self.dtype).to(self.device)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32).to(self.device)


def indexer(draw: Draw, rows: int, wide: bool) -> Case:
    heads, width, total, k = (64, 128, 8192, 512) if wide else (5, 24, 90, 20)
    operands = {"q": draw(rows, 1, heads, width), "keys": draw(rows, total, width)}
    operands |= {"weights": draw(rows, 1, heads, of=torch.float32), "lengths": draw.whole(total // 2, total, rows)}
    return Case("lightning_indexer", operands, {"k": k, "scale": 0.1, "descriptor": ""})


def listed_attention(draw: Draw, rows: int, wide: bool) -> Case:
    heads, width, turn, total, picks = (64, 512, 64, 3000, 1024) if wide else (3, 32, 8, 90, 40)
    operands = {"q_latent": draw(rows, 1, heads, width), "q_rope": draw(rows, 1, heads, turn)}
    operands |= {"latent": draw(rows, total, width), "rope": draw(rows, total, turn)}
    operands |= {"indices": draw.whole(-50, total, rows, 1, picks)}
    return Case("sparse_attention", operands, {"scale": 0.05, "descriptor": ""})


def full_attention(draw: Draw, rows: int, wide: bool) -> Case:
    heads, width, turn, total = (64, 512, 64, 3000) if wide else (3, 32, 8, 90)
    operands = {"q_latent": draw(rows, 1, heads, width), "q_rope": draw(rows, 1, heads, turn)}
    operands |= {"latent": draw(rows, total, width), "rope": draw(rows, total, turn)}
    operands |= {"lengths": draw.whole(total // 3, total, rows)}
    return Case("latent_attention", operands, {"scale": 0.05, "descriptor": ""})


def delta_step(draw: Draw, rows: int, wide: bool) -> Case:
    heads, dim = (32, 128) if wide else (2, 8)
    channels, single = 3 * heads * dim, torch.float32
    operands = {"qkv": draw(rows, 1, channels), "conv_weight": draw(channels, 4), "conv_state": draw(rows, channels, 3)}
    operands |= {"gate": draw(rows, 1, heads * dim), "dt_bias": draw(heads * dim, of=single)}
    operands |= {"a_log": draw(heads, of=single), "beta": draw(rows, 1, heads)}
    operands |= {"state": draw(rows, heads, dim, dim, of=single), "out_gate": draw(rows, 1, heads, dim)}
    operands |= {"norm_weight": draw(dim)}
    attributes = {"scale": dim**-0.5, "l2_eps": 1e-6, "lower_bound": -5.0, "norm_eps": 1e-5, "state_layout": "vk"}
    shared = ("conv_weight", "dt_bias", "a_log", "norm_weight")
    return Case("kda_decode", operands, attributes, shared, ("conv_state", "state"))


def delta_run(draw: Draw, rows: int, wide: bool) -> Case:
    heads, dim, tokens = (4, 128, 100) if wide else (2, 8, 37)
    operands: dict[str, Tensor | None] = {name: draw(rows, tokens, heads, dim) for name in ("q", "k", "v", "g")}
    operands |= {"beta": draw(rows, tokens, heads), "initial_state": draw(rows, heads, dim, dim, of=torch.float32)}
    operands |= {"a_log": draw(heads, of=torch.float32), "dt_bias": draw(heads * dim, of=torch.float32)}
    attributes = {"scale": 0.1, "l2_norm": True, "l2_eps": 1e-6, "lower_bound": -5.0, "state_layout": "vk"}
    return Case("kda_prefill", operands, attributes, ("a_log", "dt_bias"))


def convolution(draw: Draw, rows: int, wide: bool) -> Case:
    channels = 4096 if wide else 20
    operands = {"x": draw(rows, 9, channels), "weight": draw(channels, 1, 4), "initial_state": draw(rows, channels, 3)}
    return Case("short_conv", operands, {"activation": True}, ("weight",))


def experts(draw: Draw, rows: int, wide: bool) -> Case:
    width, inner, count = (2304, 1024, 64) if wide else (24, 20, 10)
    operands: dict[str, Tensor | None] = {"x": draw(rows, width), "logits": draw(rows, count, of=torch.float32)}
    operands |= {"bias": draw(count, of=torch.float32) * 0.1, "gate_up": draw(count, 2 * inner, width) * width**-0.5}
    operands |= {"down": draw(count, width, inner) * inner**-0.5, "norm_weight": None, "up": None}
    operands |= {"shared_gate": draw(rows, inner), "shared_up": draw(rows, inner)}
    operands |= {"shared_down": draw(width, inner) * inner**-0.5, "residual": draw(rows, width)}
    return Case("moe_experts", operands, MOE, ("bias", "gate_up", "down", "norm_weight", "up", "shared_down"))


def norm(draw: Draw, rows: int, wide: bool) -> Case:
    width = 7168 if wide else 36
    operands = {"x": draw(rows, 1, width), "weight": draw(width), "residual": draw(rows, 1, width)}
    return Case("rms_norm", operands, {"eps": 1e-5, "rounds_first": True}, ("weight",))


def key_write(draw: Draw, rows: int, wide: bool) -> Case:
    form = IndexKeyDescriptor("contiguous", "float8_e4m3fn", 128, 0, "power2")
    total = 512 if wide else 70
    keys = draw.whole(0, 255, rows, total, 132).to(torch.uint8)
    operands = {"keys": keys, "values": draw(rows, 3, 128), "positions": draw.whole(0, 20, rows, 3)}
    operands["positions"] = operands["positions"] + 20 * torch.arange(3, device=draw.device, dtype=torch.int32)
    operands |= dict.fromkeys(("norm_weight", "norm_bias", "cos", "sin", "block_table"))
    attributes = {"norm_eps": 1e-6, "rope_style": "none", "descriptor": str(form)}
    return Case("index_key_write", operands, attributes, written=("keys",))


def latent_write(draw: Draw, rows: int, wide: bool) -> Case:
    form = LatentDescriptor("contiguous", "float8_e4m3fn", 512, 64, 0, 1, 128, "scales_rope", "power2")
    total = 512 if wide else 70
    operands: dict[str, Tensor | None] = {"latent": draw.whole(0, 255, rows, total, 656).to(torch.uint8), "rope": None}
    operands |= {"values": draw(rows, 3, 512), "rope_values": draw(rows, 3, 64)}
    steps = 20 * torch.arange(3, device=draw.device, dtype=torch.int32)
    operands |= {"positions": draw.whole(0, 20, rows, 3) + steps}
    operands |= dict.fromkeys(("cos", "sin", "block_table", "norm_weight"))
    attributes = {"norm_eps": 1e-6, "rope_style": "none", "descriptor": str(form)}
    return Case("latent_write", operands, attributes, written=("latent",))


CASES = (
    indexer, listed_attention, full_attention, delta_step, delta_run, convolution, experts, norm, key_write,
    latent_write,
)  # fmt: skip


def results(module: ModuleType, case: Case, operands: dict[str, Tensor | None]) -> list[Tensor]:
    """What a launch returns and writes; ``operands`` stay as they are."""
    given = {name: tensor.clone() if name in case.written and tensor is not None else tensor for name, tensor in
             operands.items()}  # fmt: skip
    found = module.launch(*given.values())
    returned = [] if found is None else [found] if isinstance(found, Tensor) else list(found)
    return returned + [tensor for name in case.written if (tensor := given[name]) is not None]


@pytest.mark.parametrize("rows", [4, 19])
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_row_has_its_bits_anywhere_in_any_company(
    kernel: Callable[..., ModuleType], device: str, make: Callable[..., Case], rows: int
) -> None:
    wide = device != "cpu"
    if rows > 4 and not wide and make is not experts:
        pytest.skip("only experts change their form with more rows, and interpreting takes long")
    dtype = torch.bfloat16 if wide else torch.float32
    case, others = (make(Draw(seed, device, dtype), rows, wide) for seed in (1, 2))
    module = kernel(case.op, case.operands, case.attributes, target=device)
    first = results(module, case, case.operands)
    for row, place in ((0, rows - 1), (rows - 1, 1), (1, 1)):
        company = dict(case.operands)
        for name, tensor in case.operands.items():
            if tensor is not None and name not in case.shared:
                company[name] = others.operands[name].clone()
                company[name][place] = tensor[row]
        for found, wanted in zip(results(module, case, company), first, strict=True):
            assert found.shape[0] == rows and torch.equal(found[place], wanted[row]), case.op
