"""A directory of weights bound to a compiled program, and the memory that reading takes."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published import kimi, seeded_state, write
from tiny_models import DEEPSEEK, KIMI, write_model
from torch import Tensor

import kimigraph
from kimigraph.capture import load_source
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.tensor_file import write_tensors
from kimigraph.run import program_weights, run_artifact

CONFIG = CompileConfig(context=16, target="cpu:reference", opt_level=0, cache="off", report=False)


def compiled(directory: Path, out: Path, opt_level: int = 0) -> Path:
    (report,) = compile_source(str(directory), [replace(CONFIG, opt_level=opt_level)], out, lambda message: None)
    return Path(str(report.artifact))


def stepped(directory: Path, artifact: Path) -> tuple[Tensor, Tensor]:
    """One step of the eager model, and of the artifact with the checkpoint that the directory holds."""
    source = load_source(str(directory), CONFIG)
    module, args, _ = source.build()
    with torch.no_grad():
        want = module(*args)
    return want, kimigraph.load(artifact, weights=str(directory))(*source.build()[1])


@pytest.mark.parametrize(("shards", "opt_level"), [(0, 0), (3, 2)])
def test_published_kimi_weights_run(tmp_path: Path, shards: int, opt_level: int) -> None:
    """At -O2 the program takes some weights side by side; the checkpoint has them apart."""
    directory = Path(write_model(tmp_path / "model", KIMI, seed=3))
    state = seeded_state(load_source(str(directory), CONFIG).build()[0])
    write(directory, kimi(state), shards)
    artifact = compiled(directory, tmp_path / "artifact", opt_level)
    want, got = stepped(directory, artifact)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    seen: list[tuple[int, int]] = []
    result = run_artifact(artifact, directory, None, 1, lambda done, total: seen.append((done, total)))
    assert result["passed"] is None
    done, totals = [pair[0] for pair in seen], {pair[1] for pair in seen}
    assert done == sorted(done) and done[0] == 0 and totals == {done[-1]} and done[-1] > 0


def test_saved_deepseek_weights_run(tmp_path: Path) -> None:
    from transformers import DeepseekV32ForCausalLM

    from kimigraph.adapters import transformers_models as adapter

    model = DeepseekV32ForCausalLM(adapter.read_config(DEEPSEEK, "config.json"))
    model.load_state_dict(seeded_state(model))
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    want, got = stepped(tmp_path / "model", compiled(tmp_path / "model", tmp_path / "artifact"))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_program_s_missing_weights_are_all_named(tmp_path: Path) -> None:
    directory = Path(write_model(tmp_path / "model", KIMI))
    artifact = compiled(directory, tmp_path / "artifact")
    state = seeded_state(load_source(str(directory), CONFIG).build()[0])
    del state["model.norm.weight"], state["lm_head.weight"]
    state["model.embed_tokens.weight"] = torch.ones(3, 3)
    manifest = kimigraph.compiler.read_manifest(artifact)
    with pytest.raises(UsageError, match=r"lacks 2 weights: lm_head\.weight, model\.norm\.weight; it has misshapen 1"):
        program_weights(manifest, write(tmp_path / "weights", state))


PEAK = """
import re, sys
from pathlib import Path
import torch
from kimigraph.weights import layout_of, load_module
from kimigraph.weights.layout import Layout, Stacked

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = torch.nn.Parameter(torch.empty(32, 1024, 512), requires_grad=False)
        self.dense = torch.nn.Parameter(torch.empty(16, 1024, 1024, dtype=torch.bfloat16), requires_grad=False)

def memory(field):
    return int(re.search(rf"{field}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(1)
layout = Layout((Stacked(r"()experts", (r"experts.{expert}.gate", r"experts.{expert}.up")),
                 Stacked(r"()dense", (r"dense.{expert}",))))
model = Model()
Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
load_module(model, Path(sys.argv[1]), layout)
print(memory("VmHWM") - before, model.experts[:, 700, 0].tolist() == [expert + 0.5 for expert in range(32)])
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_reading_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    """Resident memory, pages of the files included: 96 MiB of weights from one file, at most 1.1 times that."""
    tensors: dict[str, Any] = {}
    for expert in range(32):
        tensors |= {f"experts.{expert}.gate": torch.full((512, 512), float(expert))}
        tensors |= {f"experts.{expert}.up": torch.full((512, 512), expert + 0.5)}
    tensors |= {f"dense.{part}": torch.ones(1024, 1024, dtype=torch.bfloat16) for part in range(16)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert size == 96 * 2**20
    write_tensors(tmp_path / "model.safetensors", tensors)
    root = str(Path(kimigraph.__file__).parents[1])
    command = [sys.executable, "-c", PEAK, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": root})
    assert ran.returncode == 0, ran.stderr
    peak, right = ran.stdout.split()
    assert right == "True" and size <= int(peak) <= 1.1 * size, f"{int(peak) / size:.3f} times the weights"
