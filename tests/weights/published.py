"""Checkpoints of tiny models as they are published, written out by hand: not by the tables that are under test."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

Convert = Callable[[str, Tensor], dict[str, Tensor]]


def seeded_state(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Values for the module's state dict, all different."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in module.state_dict().items()
    }


def write(directory: Path, tensors: Mapping[str, Tensor], shards: int = 0) -> Path:
    """Write one file, or that many shards with their index; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    ready = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if not shards:
        save_file(ready, directory / "model.safetensors", {"format": "pt"})
        return directory
    places: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(ready.items())[shard::shards])
        save_file(part, directory / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    write_index(directory, places)
    return directory


def write_index(directory: Path, places: Mapping[str, str]) -> None:
    document = {"metadata": {"total_size": 0}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(document))


def kimi(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A K3.1 state dict in the published layout of Kimi K3: prefix, convolutions and experts apart, A_log padded."""
    published: dict[str, Tensor] = {}
    for name, tensor in state.items():
        front = "language_model." + name.rpartition(".")[0]
        if name.endswith("self_attn.conv1d.weight"):
            owner = front.removesuffix("conv1d")
            published |= {f"{owner}{part}_conv1d.weight": t for part, t in zip("qkv", tensor.chunk(3), strict=True)}
        elif name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                published |= {f"{front}.{expert}.w1.weight": gate, f"{front}.{expert}.w3.weight": up}
        elif name.endswith("experts.down_proj"):
            published |= {f"{front}.{expert}.w2.weight": down for expert, down in enumerate(tensor)}
        elif name.endswith("A_log"):
            published["language_model." + name] = torch.cat([tensor, torch.zeros(5)])
        else:
            published["language_model." + name] = tensor
    return published
