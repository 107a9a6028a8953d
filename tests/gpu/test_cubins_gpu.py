"""Kernels compiled ahead of time, launched through the driver: what Triton's own launches of the same text compute."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import kimigraph
from kimigraph.codegen import build_artifact
from kimigraph.ir.manifest import Manifest
from kimigraph.runtime.executor import load_program

pytestmark = pytest.mark.gpu
TARGET = "cuda:sm_90"


def _toolbox() -> ModuleType:
    """``spec``, ``make_program`` and ``call`` of the code generator's tests."""
    path = Path(__file__).parents[1] / "codegen" / "conftest.py"
    spec = importlib.util.spec_from_file_location("codegen_fixtures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOLS = _toolbox()
HEADS, SIDE, TOKENS, CONTEXT, PICKS = 4, 128, 96, 4096, 512
CHANNELS = 3 * HEADS * SIDE


def inputs() -> list[Any]:
    def bf16(name: str, *shape: int, kind: str = "input", **more: Any) -> Any:
        return TOOLS.spec(name, shape, kind, "bfloat16", **more)

    fp32 = TOOLS.spec
    return [
        bf16("qkv", 2, 1, CHANNELS),
        fp32("conv_weight", (CHANNELS, 4), "weight"),
        bf16("conv_state", 2, CHANNELS, 3, kind="cache", mutated=True),
        bf16("gate", 2, 1, HEADS * SIDE),
        fp32("dt_bias", (HEADS * SIDE,), "weight"),
        fp32("a_log", (HEADS,), "weight"),
        bf16("beta", 2, 1, HEADS),
        fp32("state", (2, HEADS, SIDE, SIDE), "cache", mutated=True),
        bf16("q", 2, 1, 64, 128),
        bf16("keys", 2, CONTEXT, 128, kind="cache"),
        fp32("weights", (2, 1, 64)),
        fp32("lengths", (2,), dtype="int32", value_range=(PICKS, CONTEXT)),
        bf16("q_latent", 2, 1, 64, 512),
        bf16("q_rope", 2, 1, 64, 64),
        bf16("latent", 2, CONTEXT, 512, kind="cache"),
        bf16("rope", 2, CONTEXT, 64, kind="cache"),
        bf16("pq", 1, TOKENS, HEADS, SIDE),
        bf16("pk", 1, TOKENS, HEADS, SIDE),
        bf16("pv", 1, TOKENS, HEADS, SIDE),
        fp32("pg", (1, TOKENS, HEADS, SIDE)),
        bf16("pbeta", 1, TOKENS, HEADS),
        bf16("x", 1, TOKENS, CHANNELS),
    ]


def build(graph: Any, *nodes: Any) -> list[Any]:
    """KDA's step, indexer and attention over its picks, KDA's prefill, a short convolution."""
    import operator

    def item(node: Any, index: int) -> Any:
        return graph.call_function(operator.getitem, (node, index))

    named = dict(zip((spec.name for spec in inputs()), nodes, strict=True))
    step = TOOLS.call(graph, "kda_decode", *nodes[:8], scale=0.09, lower_bound=-5.0, state_layout="vk")
    picks = TOOLS.call(graph, "lightning_indexer", *nodes[8:12], k=PICKS, scale=0.09)
    operands = (named["q_latent"], named["q_rope"], named["latent"], named["rope"], picks)
    attended = TOOLS.call(graph, "sparse_attention", *operands, scale=0.07)
    prefill = TOOLS.call(
        graph, "kda_prefill", *nodes[16:21], None, named["a_log"], named["dt_bias"],
        scale=0.09, l2_norm=True, lower_bound=-5.0,
    )  # fmt: skip
    mixed = TOOLS.call(graph, "short_conv", named["x"], named["conv_weight"], activation=True)
    return [step, picks, item(attended, 0), item(attended, 1), item(prefill, 0), item(prefill, 1), item(mixed, 0)]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cubins") / "program"
    directory.mkdir()
    build_artifact(TOOLS.make_program(inputs(), build), TARGET, directory, self_test=False)
    return directory


@pytest.fixture(scope="module")
def compiled_by_triton(artifact: Path) -> Path:
    """The same artifact, whose program launches the kernels' source instead of their cubins."""
    twin = artifact.with_name("twin")
    shutil.copytree(artifact, twin)
    text = (twin / "program.py").read_text()
    pattern = r'cubins\.load_host_half\(HERE / "kernels/(\w+)_launch\.py", driver\)'
    changed, count = re.subn(pattern, r'load("kernels/\1.py")', text)
    assert count == 5
    (twin / "program.py").write_text(changed)
    return twin


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    made: list[torch.Tensor] = []
    for spec in inputs():
        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            made.append(torch.randn(spec.shape, generator=generator, device="cuda").mul_(0.3).to(dtype))
        else:
            made.append(torch.randint(*spec.value_range, spec.shape, generator=generator, device="cuda", dtype=dtype))
    return made


def results(step: Any) -> list[torch.Tensor]:
    """Outputs and updated inputs of two steps."""
    given = tensors()
    outputs = [*step(*given), *step(*given)]
    return [*outputs, given[2], given[7]]


def test_cubins_compute_what_tritons_launches_compute(artifact: Path, compiled_by_triton: Path) -> None:
    ours = results(load_program(artifact).step)
    theirs = results(load_program(compiled_by_triton).step)
    assert all(torch.isfinite(tensor.float()).all() and tensor.float().abs().sum() > 0 for tensor in ours)
    assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(ours)


def test_a_captured_graph_replays_cubins(artifact: Path) -> None:
    step, given = load_program(artifact).step, tensors()
    expected = [tensor.clone() for tensor in step(*given)]
    given = tensors()
    for _ in range(2):
        step(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(*given)
    for tensor, fresh in zip(given, tensors(), strict=True):
        tensor.copy_(fresh)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_a_thread_of_its_own_launches_cubins(artifact: Path) -> None:
    """It has no CUDA context when it starts, and a stream of its own."""
    step = load_program(artifact).step
    expected = results(step)
    found: list[torch.Tensor] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found.extend(results(step))
            torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


WARM = """
import json, sys
from pathlib import Path
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.run import run_artifact
config = CompileConfig(target="cuda:sm_90", context=64, report=False, cache=sys.argv[3])
report = compile_source(sys.argv[1], [config], Path(sys.argv[2]), lambda _: None)[0]
result = run_artifact(Path(sys.argv[2]), None, None, 1) if len(sys.argv) > 4 else {"passed": None}
print(json.dumps({"cache": report.cache["status"], "passed": result["passed"], "triton": "triton" in sys.modules}))
"""


@pytest.mark.slow
def test_a_warm_start_needs_no_triton_and_no_c_compiler(tmp_path: Path) -> None:
    root = Path(kimigraph.__file__).parent.parent
    source = root / "examples" / "k31_tiny"

    def run(out: str, mode: str, *more: str, **environment: str) -> dict[str, Any]:
        command = [sys.executable, "-c", WARM, str(source), str(tmp_path / out), mode, *more]
        settings = {
            **os.environ,
            "KIMIGRAPH_CACHE_DIR": str(tmp_path / "cache"),
            "PYTHONPATH": str(root),
            **environment,
        }
        ran = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout.splitlines()[-1])

    assert run("cold", "use")["cache"] == "miss"
    warm = run("warm", "readonly", "run", CC="/bin/false", TRITON_CACHE_DIR=str(tmp_path / "empty"))
    assert warm == {"cache": "hit", "passed": True, "triton": False}
    assert not (tmp_path / "empty").exists()
    assert Manifest.read(tmp_path / "warm").target == "cuda:sm_90"
