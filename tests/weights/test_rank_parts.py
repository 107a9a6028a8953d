"""Ranks read their parts of a checkpoint, and nothing else."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kimigraph.ir.program import InputSpec
from kimigraph.ir.reference.mxfp4_quantize import GROUP, mxfp4_quantize, parts_of
from kimigraph.ir.shares import Share
from kimigraph.weights import Watch, drawn_weight, layout_of, read_weights

EXPERTS = "model.layers.1.block_sparse_moe.experts."
SHARES = {
    "model.layers.0.self_attn.q_proj.weight": ((12, 8), Share(0, 1, 4)),
    "model.layers.0.self_attn.o_proj.weight": ((8, 12), Share(1, 1, 4)),
    "model.layers.0.self_attn.conv1d.weight": ((36, 1, 4), Share(0, 3, 4)),
    "model.layers.0.self_attn.A_log": ((12,), Share(0, 1, 4)),
    EXPERTS + "gate_up_proj": ((3, 16, 8), Share(1, 2, 4)),
    EXPERTS + "down_proj": ((3, 8, 8), Share(2, 1, 4)),
    "model.norm.weight": ((8,), None),
}


def specs(rank_part: bool) -> list[InputSpec]:
    """The inputs of a rank, or of the whole model."""
    found: list[InputSpec] = []
    for source, (shape, share) in SHARES.items():
        taken = share if rank_part else None
        local = shape if taken is None else taken.local(shape)
        stride = torch.empty(local).stride()
        found.append(InputSpec(source, "weight", source, local, stride, "float32", share=taken))
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Published names: experts and convolutions apart, per-head numbers with padding."""
    values = {
        source: torch.randn(shape)
        for source, (shape, _) in SHARES.items()
        if "experts" not in source and "conv" not in source
    }
    values["model.layers.0.self_attn.A_log"] = torch.cat([torch.randn(12), torch.zeros(4)])
    for part in "qkv":
        values[f"model.layers.0.self_attn.{part}_conv1d.weight"] = torch.randn(12, 1, 4)
    for expert in range(3):
        for name, shape in (("w1", (8, 8)), ("w3", (8, 8)), ("w2", (8, 8))):
            values[f"{EXPERTS}{expert}.{name}.weight"] = torch.randn(shape)
    save_file(values, tmp_path / "model.safetensors")
    return tmp_path


def test_parts_are_those_of_the_whole(checkpoint: Path) -> None:
    layout = layout_of("kimi_k31")
    told: dict[str, int] = {}

    def watch(name: str) -> Watch:
        return lambda done, total: told.update({name: total})

    whole = read_weights(checkpoint, specs(False), layout, watch=watch("whole"))
    for rank in range(4):
        parts = read_weights(checkpoint, specs(True), layout, watch=watch("part"), rank=rank)
        for source, (_, share) in SHARES.items():
            wanted = whole[source] if share is None else share.take(whole[source], rank)
            assert torch.equal(parts[source], wanted), source
    shared = sum(whole[source].numel() * 4 for source, (_, share) in SHARES.items() if share is not None)
    replicated = sum(whole[source].numel() * 4 for source, (_, share) in SHARES.items() if share is None)
    padding = 4 * 4
    assert told["whole"] == shared + replicated + padding
    assert told["part"] == shared // 4 + replicated + padding // 4


def test_experts_of_a_rank_stay_packed(tmp_path: Path) -> None:
    share, rows, columns = Share(2, 1, 2), 4, 4 * GROUP
    packed = mxfp4_quantize(torch.randn(2, rows, columns))
    codes, scales = parts_of(packed)
    for expert in range(2):
        name = f"{EXPERTS}{expert}.w2.weight"
        save = {f"{name}_packed": codes[expert].contiguous(), f"{name}_scale": scales[expert].contiguous()}
        save_file(save, tmp_path / f"e{expert}.safetensors")
    source = EXPERTS + "down_proj"
    local = share.local((2, rows, columns))
    spec = InputSpec(source, "weight", source, local, torch.empty(local).stride(), "bfloat16", share=share)
    for rank in range(2):
        found = read_weights(tmp_path, [spec], layout_of("kimi_k31"), packed={source: "made"}, rank=rank)
        own_codes, own_scales = parts_of(found["made"])
        assert torch.equal(own_codes, share.take(codes, rank))
        assert torch.equal(own_scales, share.take(scales, rank))


def test_drawn_parts_are_those_of_the_whole() -> None:
    share = Share(0, 1, 2)
    whole = InputSpec("w", "weight", "w.weight", (8, 4), (4, 1), "float32")
    part = InputSpec("w", "weight", "w.weight", (4, 4), (4, 1), "float32", share=share)
    device = torch.device("cpu")
    assert torch.equal(drawn_weight(part, 5, device, 1), drawn_weight(whole, 5, device)[4:])
