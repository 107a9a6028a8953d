"""A warm start on a GPU: from a full compile cache to the first replay of a decode step of Kimi K3.1.

    PYTHONPATH=. python bench/warm_start.py --layers 16 --context 4096 --out bench/results/warm_start.json

The first process fills the cache, if it has to. The second one, which is measured, has an empty Triton cache and no
C compiler (CC=/bin/false); its clock starts after ``import torch`` and the initialisation of CUDA, stops while the
weights are made, and ends when the first replay of the step's CUDA graph is done.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kimigraph.ir.env import environment_with

CONFIG = Path(__file__).parent.parent / "examples" / "k31" / "config.json"
READY = "READY "


def model_directory(layers: int, directory: Path) -> Path:
    """A directory with the configuration of K3.1 at width: three KDA layers, then one of sparse attention, repeated."""
    document = json.loads(CONFIG.read_text(encoding="utf-8"))
    document["num_hidden_layers"] = layers
    numbers = range(1, layers + 1)
    document["linear_attn_config"]["full_attn_layers"] = [number for number in numbers if number % 4 == 0]
    document["linear_attn_config"]["kda_layers"] = [number for number in numbers if number % 4]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return directory


def compile_step(source: Path, options: argparse.Namespace, out: Path, cache: str) -> dict[str, Any]:
    """Compile, or take from the cache; the report."""
    from kimigraph.compiler import compile_source
    from kimigraph.ir.config import CompileConfig

    config = CompileConfig(
        target=options.target,
        batch=options.batch,
        context=options.context,
        random_weights=True,
        cache=cache,
        report=False,
    )
    return compile_source(str(source), [config], out, lambda _: None)[0].as_dict()


def random_tensor(spec: Any) -> Any:
    """Memory of an input on the GPU with small random values, integers in their range."""
    import torch

    dtype = getattr(torch, spec.dtype)
    made = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device="cuda")
    if dtype.is_floating_point:
        return made.normal_(std=0.02)
    low, high = spec.value_range or (0, 1)
    return made.random_(low, high)


def measure(source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The measured process: seconds of each stage up to the first replay."""
    import torch

    torch.cuda.init()
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    before = set(sys.modules)
    stages: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal clock
        torch.cuda.synchronize()
        now = time.perf_counter()
        stages[name] = stages.get(name, 0.0) + now - clock
        clock = now

    out = Path(tempfile.mkdtemp()) / "program"
    report = compile_step(source, options, out, "use")
    lap("compile cache")
    from kimigraph.ir.manifest import Manifest
    from kimigraph.runtime.executor import Executor

    manifest = Manifest.read(out)
    lap("load")
    weights = {spec.source: random_tensor(spec) for spec in manifest.bound if spec.kind != "constant"}
    inputs = [random_tensor(spec) for spec in manifest.inputs if not spec.bound]
    lap("weights")
    executor = Executor(out, weights)
    lap("load")
    executor(*inputs)
    lap("first step")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executor(*inputs)
    lap("graph capture")
    graph.replay()
    lap("first replay")
    start = time.perf_counter()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    replay = (time.perf_counter() - start) / 20
    return {
        "cache": report["cache"],
        "stages": {name: round(value, 4) for name, value in stages.items()},
        "seconds": round(sum(value for name, value in stages.items() if name != "weights"), 4),
        "replay_us": round(replay * 1e6, 1),
        "triton_imported": any(name == "triton" for name in set(sys.modules) - before),
        "compiled_by_triton": len(list(options.triton_cache.rglob("*.cubin"))),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "device": torch.cuda.get_device_name(),
    }


def main() -> None:
    """Fill the cache, then measure in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--fill-only", action="store_true", help="fill the cache and measure nothing (needs no GPU)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--triton-cache", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = model_directory(options.layers, Path(scratch) / f"k31_{options.layers}")
        if options.measure:
            print(READY + json.dumps(measure(source, options)))
            return
        filled = compile_step(source, options, Path(scratch) / "filled", "use")
        print(json.dumps({"cache": filled["cache"], "timing": filled["timing"]}), flush=True)
        if options.fill_only:
            return
        runs = [run_measured(Path(scratch)) for _ in range(options.repeat)]
    runs.sort(key=lambda run: run["seconds"])
    document = {
        "command": "PYTHONPATH=. python " + " ".join(sys.argv),
        "layers": options.layers,
        "batch": options.batch,
        "context": options.context,
        "cold_seconds": filled["timing"]["total"] if filled["cache"]["status"] != "hit" else None,
        **runs[len(runs) // 2],
        "all_seconds": [run["seconds"] for run in runs],
    }
    print(json.dumps(document, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def run_measured(scratch: Path) -> dict[str, Any]:
    """One measured process."""
    triton_cache = scratch / "triton"
    shutil.rmtree(triton_cache, ignore_errors=True)
    triton_cache.mkdir()
    environment = environment_with(CC="/bin/false", TRITON_CACHE_DIR=str(triton_cache))
    command = [sys.executable, *sys.argv, "--measure", "--triton-cache", str(triton_cache)]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith(READY)]
    return json.loads(lines[-1].removeprefix(READY))


if __name__ == "__main__":
    main()
