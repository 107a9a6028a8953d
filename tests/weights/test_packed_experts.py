"""Experts of a checkpoint in MXFP4 stay packed under a policy: the bytes that were published, and the same results."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from published import kimi, seeded_state, write
from tiny_models import KIMI, write_model
from torch import Tensor

import kimigraph
from kimigraph.capture import load_source
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.reference.mxfp4_quantize import joined_planes, mxfp4_dequantize
from kimigraph.run import program_weights

WIDE = {**KIMI, "routed_expert_hidden_size": 64, "moe_intermediate_size": 32}
POLICY = '[roles]\nexperts = "mxfp4"\n'
CONFIG = CompileConfig(context=16, target="cpu:reference", opt_level=2, cache="off", report=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, tuple[Tensor, Tensor]]]:
    """A K3.1 with packed experts, and their codes and scales by name; some groups use small codes alone."""
    directory = Path(write_model(tmp_path / "model", WIDE, seed=3))
    generator = torch.Generator().manual_seed(1)
    published: dict[str, Tensor] = {}
    packed: dict[str, tuple[Tensor, Tensor]] = {}
    for name, tensor in kimi(seeded_state(load_source(str(directory), CONFIG).build()[0])).items():
        if ".experts." not in name:
            published[name] = tensor
            continue
        rows, columns = tensor.shape
        most = torch.randint(1, 16, (rows, columns // 32, 1), generator=generator)
        codes = (torch.randint(0, 16, (rows, columns // 32, 32), generator=generator) % (most + 1)).to(torch.uint8)
        codes = codes.flatten(1)
        scales = torch.randint(118, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        packed[name.removesuffix(".weight")] = codes, scales
        front = name.removesuffix("weight")
        published |= {f"{front}weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, f"{front}weight_scale": scales}
    write(directory, published, 2)
    return directory, packed


def compiled(directory: Path, out: Path, policy: str) -> Path:
    config = replace(CONFIG, policy=policy)
    (report,) = compile_source(str(directory), [config], out, lambda message: None)
    return Path(str(report.artifact))


def stepped(artifact: Path, directory: Path, weights: Path) -> Tensor:
    """One step from the model's example caches."""
    return kimigraph.load(artifact, weights=weights)(*load_source(str(directory), CONFIG).build()[1])


def test_the_published_bytes_are_what_the_program_reads(checkpoint, tmp_path: Path) -> None:
    directory, packed = checkpoint
    artifact = compiled(directory, tmp_path / "packed", POLICY)
    manifest = Manifest.read(artifact)
    names = manifest.packed_weights()
    assert len(names) == 2 * sum(".experts.gate_up" in name for name in names) > 0
    taken = program_weights(manifest, directory)
    assert not names.keys() & taken.keys()  # no real weight of an expert was made
    for source, name in names.items():
        owner = "language_model." + source.rpartition(".")[0]
        parts = ("w1", "w3") if source.endswith("gate_up_proj") else ("w2",)
        for expert, plane in enumerate(taken[name]):
            pairs = [packed[f"{owner}.{expert}.{part}"] for part in parts]
            wanted = joined_planes(*(torch.cat(both) for both in zip(*pairs, strict=True)))
            assert torch.equal(plane, wanted)
    plain = compiled(directory, tmp_path / "plain", "off")
    results = [stepped(one, directory, directory) for one in (artifact, plain)]
    assert results[0].count_nonzero() > 0
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_in_real_numbers_is_packed_when_it_is_bound(checkpoint, tmp_path: Path) -> None:
    """The same numbers, published as real ones: scales may differ from those of the codes, values do not."""
    directory, packed = checkpoint
    artifact = compiled(directory, tmp_path / "packed", POLICY)
    wanted = stepped(artifact, directory, directory)
    real = {
        f"{name}.weight": mxfp4_dequantize(joined_planes(codes, scales)) for name, (codes, scales) in packed.items()
    }
    state = seeded_state(load_source(str(directory), CONFIG).build()[0])
    other = write(tmp_path / "real", {**kimi(state), **real})
    torch.testing.assert_close(stepped(artifact, directory, other), wanted, rtol=1e-4, atol=1e-4)
