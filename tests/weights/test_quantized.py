"""Quantized weights are read as the numbers that they stand for; other formats are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from published import kimi, seeded_state, write
from tiny_models import KIMI
from torch import Tensor

from kimigraph.ir.errors import UsageError
from kimigraph.models.kimi_k31 import KimiK31Config, KimiK31ForCausalLM
from kimigraph.weights import Checkpoint, layout_of, load_module
from kimigraph.weights.quantized import real_tensors

WIDE = {**KIMI, "routed_expert_hidden_size": 64, "moe_intermediate_size": 32}


def code_value(code: int) -> float:
    """The number of an E2M1 code, from its bits: sign, two of exponent, one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -magnitude if code & 8 else magnitude


def mxfp4(rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """A packed weight with its scales, and the numbers, taken one by one."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(110, 140, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    values = [
        [code_value(int(codes[r, c])) * 2.0 ** (int(exponents[r, c // 32]) - 127) for c in range(columns)]
        for r in range(rows)
    ]
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight_packed": packed, "weight_scale": exponents}, torch.tensor(values)


@pytest.mark.parametrize("scale_type", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp4_experts_of_a_kimi_checkpoint(tmp_path: Path, scale_type: torch.dtype) -> None:
    model = KimiK31ForCausalLM(KimiK31Config.from_dict({**WIDE, "quantization_config": {"format": "mxfp4"}}))
    state = seeded_state(model)
    published: dict[str, Tensor] = {}
    real: dict[str, Tensor] = {}
    for seed, (name, tensor) in enumerate(kimi(state).items()):
        if ".experts." in name:
            stored, real[name] = mxfp4(*tensor.shape, seed)
            stored["weight_scale"] = stored["weight_scale"].view(scale_type)
            published |= {f"{name.removesuffix('weight')}{part}": value for part, value in stored.items()}
        else:
            published[name] = tensor
    load_module(model, write(tmp_path, published, 2), layout_of("kimi_k31"))
    owner = "language_model.model.layers.1.block_sparse_moe.experts"
    experts = model.model.layers[1].block_sparse_moe.experts
    for expert in range(4):
        gate, up = experts.gate_up_proj[expert].chunk(2)
        for got, part in ((gate, "w1"), (up, "w3"), (experts.down_proj[expert], "w2")):
            torch.testing.assert_close(got, real[f"{owner}.{expert}.{part}.weight"], rtol=0, atol=0)


def test_the_ends_of_the_scales(tmp_path: Path) -> None:
    packed, scales = torch.full((1, 48), 0x22, dtype=torch.uint8), torch.tensor([[0, 254, 255]], dtype=torch.uint8)
    write(tmp_path, {"a.weight_packed": packed, "a.weight_scale": scales})
    values = real_tensors(Checkpoint.open(tmp_path))["a.weight"].read().reshape(3, 32)
    assert (values[0] == 2.0**-127).all() and (values[1] == 2.0**127).all() and values[2].isnan().all()


def test_fp8_blocks_at_ragged_sizes(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(130, 200, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, generator=generator)
    write(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales})
    got = real_tensors(Checkpoint.open(tmp_path))["a.weight"].read()
    for row, column in ((0, 0), (127, 127), (128, 127), (127, 128), (129, 199)):
        assert got[row, column] == values[row, column].float() * scales[row // 128, column // 128]
    assert got.shape == (130, 200)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a.weight_packed": torch.zeros(4, 8, dtype=torch.int32), "a.weight_scale": torch.ones(4, 1)},
        {"a.weight_packed": torch.zeros(4, 32, dtype=torch.uint8), "a.weight_scale": torch.ones(4, 2)},
        {"a.weight_packed": torch.zeros(4, 32, dtype=torch.uint8)},
        {"a.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn), "a.weight_scale": torch.ones(4, 1)},
        {"a.weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn)},
        {"a.weight": torch.zeros(300, 4, dtype=torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 1)},
    ],
    ids=["int4", "scale-type", "no-scale", "per-row", "bare", "blocks"],
)
def test_other_formats_are_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"format": "their-own-format"}}))
    with pytest.raises(UsageError, match=r"holds weights in their-own-format that is not read .*first a\.weight"):
        real_tensors(Checkpoint.open(write(tmp_path, tensors)))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UsageError, match="in a quantized format"):
        real_tensors(Checkpoint.open(tmp_path))
