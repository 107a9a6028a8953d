"""Programs that take their memory from a planned arena, on a GPU: the same bits, and nothing allocated but results."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kimigraph.bench.branches import WIDTH, branches
from kimigraph.codegen import build_artifact
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.memory_plan import clear_plan
from kimigraph.ir.script import seeded_input
from kimigraph.run import run_artifact, seeded, seeded_weights
from kimigraph.runtime.executor import Executor, laid_out

pytestmark = pytest.mark.gpu
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
SMALL = (("num_hidden_layers", "4"), ("index_topk", "32"))
DECODE = CompileConfig(target="cuda", batch=2, context=128, cache="off", report=False, overrides=SMALL)


def bound(directory: Path) -> Executor:
    manifest = Manifest.read(directory)
    buffers = {s.source: seeded(s, manifest) for s in manifest.bound if s.kind == "buffer"}
    return Executor(directory, seeded_weights(manifest) | buffers)


def arguments(executor: Executor) -> list[torch.Tensor]:
    return [
        laid_out(seeded_input(spec, 5).to(getattr(torch, spec.dtype)), spec).cuda() for spec in executor.caller_inputs
    ]


def asked() -> int:
    """How often memory was asked for so far."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def check(planned: Executor, plain: Executor) -> None:
    ours, theirs = arguments(planned), arguments(plain)
    for _ in range(3):
        got, wanted = planned(*ours), plain(*theirs)
        assert all(map(torch.equal, (*got, *ours), (*wanted, *theirs)))
    torch.cuda.synchronize()
    before, calls = torch.cuda.memory_allocated(), asked()
    torch.cuda.reset_peak_memory_stats()
    results = planned(*ours)
    calls = asked() - calls
    nbytes = sum(-(-item.untyped_storage().nbytes() // 512) * 512 for item in results)
    assert calls == len(results)
    assert torch.cuda.max_memory_allocated() - before <= nbytes


@pytest.mark.parametrize(("form", "target"), [("decode", "cuda"), ("prefill", "cuda"), ("decode", "cuda:sm_90")])
def test_programs_allocate_their_results_and_nothing_else(form: str, target: str, tmp_path: Path) -> None:
    config = replace(DECODE, target=target)
    if form == "prefill":
        config = replace(config, phase="prefill", tokens=64)
    for name, disabled in (("planned", ()), ("plain", ("plan-memory",))):
        compile_source(EXAMPLE, [replace(config, disabled_passes=disabled)], tmp_path / name, lambda _: None)
    assert (tmp_path / "planned" / "support" / "arena.py").exists()
    assert not (tmp_path / "plain" / "support" / "arena.py").exists()
    check(bound(tmp_path / "planned"), bound(tmp_path / "plain"))
    assert run_artifact(tmp_path / "planned", None, None, 2, cuda_graph=True)["passed"] is True


def test_streams_of_callers_have_blocks_of_their_own(tmp_path: Path) -> None:
    for name in ("planned", "plain"):
        (tmp_path / name).mkdir()
        program = branches(1)
        if name == "plain":
            clear_plan(program.graph_module.graph)
        build_artifact(program, "cuda", tmp_path / name, self_test=False)
    planned, plain = Executor(tmp_path / "planned", {}), Executor(tmp_path / "plain", {})
    streams = [torch.cuda.Stream() for _ in range(4)]
    xs = [torch.randn(WIDTH, WIDTH, device="cuda") for _ in range(40)]
    torch.cuda.synchronize()
    found = []
    for number, x in enumerate(xs):
        with torch.cuda.stream(streams[number % 4]):
            found.append(planned(x, torch.zeros(WIDTH, device="cuda")))
    torch.cuda.synchronize()
    for x, (value,) in zip(xs, found, strict=True):
        assert torch.equal(value, plain(x, torch.zeros(WIDTH, device="cuda"))[0])
