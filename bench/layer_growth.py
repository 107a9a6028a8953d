"""How compilation grows with layers: Kimi K3.1 with few and with many layers, most of which are alike.

    PYTHONPATH=. python bench/layer_growth.py --layers 6 60 --out bench/results/layer_growth.json

Counts from the captured program to the stored cache entry, all caches empty, in rounds that take turns; the least of
the rounds counts, as other work on the machine only adds. ``cpu_seconds`` are those of this process and of the workers
that compile kernels. The block of the attention residuals is that of Kimi K3, 12 layers: more layers have more finished
blocks to mix, and each number of sources is a kernel of its own. Exit status 1 when the ratio of the last to the first
is ``BOUND`` or more, in CPU time, kernels or files of the entry.
"""

import argparse
import json
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kimigraph.capture import capture, load_source
from kimigraph.compiler import build, keep
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.env import environment_with, processors
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.program import CapturedProgram
from kimigraph.runtime.cache import Place
from kimigraph.session import new_session

CONFIG = Path(__file__).parent.parent / "examples" / "k31" / "config.json"
BOUND = 1.5
CACHES = {"KIMIGRAPH_CACHE_DIR": "kimigraph", "TRITON_CACHE_DIR": "triton"}


@dataclass(frozen=True)
class Captured:
    """A captured decode step and the seconds that capture took."""

    layers: int
    program: CapturedProgram
    seconds: float


def captured_step(root: Path, layers: int, block: int, config: CompileConfig) -> Captured:
    """K3.1 at width with that many layers, every fourth one with sparse attention."""
    document = json.loads(CONFIG.read_text(encoding="utf-8"))
    document |= {"num_hidden_layers": layers, "attn_res_block_size": block}
    numbers = range(1, layers + 1)
    document["linear_attn_config"]["full_attn_layers"] = [number for number in numbers if number % 4 == 0]
    document["linear_attn_config"]["kda_layers"] = [number for number in numbers if number % 4]
    directory = root / f"k31_{layers}"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(document), encoding="utf-8")
    start = time.perf_counter()
    program = capture(load_source(str(directory), config), config, weights=False)
    return Captured(layers, program, time.perf_counter() - start)


def cpu_seconds() -> float:
    """CPU time of this process and of its workers that are done."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def compile_once(captured: Captured, config: CompileConfig, caches: Path) -> dict[str, Any]:
    """Compile with empty caches: seconds, and what came out."""
    shutil.rmtree(caches, ignore_errors=True)
    with tempfile.TemporaryDirectory() as directory:
        artifact = Path(directory) / "artifact"
        artifact.mkdir()
        program = captured.program.copy()  # a compilation uses its capture up
        start, used = time.perf_counter(), cpu_seconds()
        with new_session(config, lambda _: None) as session:
            report, finished = build(program, artifact, session, use_up=True)
            keep({"model": captured.layers}, finished, report, session)
        seconds, used = time.perf_counter() - start, cpu_seconds() - used
        (entry,) = Place(caches / CACHES["KIMIGRAPH_CACHE_DIR"]).entries()
        kernels = Manifest.read(artifact).kernels
        return {
            "seconds": seconds,
            "cpu_seconds": used,
            "parts": {name: report.timing[name] for name in ("passes", "codegen", "store")},
            "nodes": report.graph["nodes_before"],
            "launches": report.launches["after"],
            "kernel_files": len({kernel.file for kernel in kernels}),
            "kernel_functions": len({cubin.file for kernel in kernels for cubin in kernel.cubins}),
            "entry_files": sum(path.is_file() for path in entry.rglob("*")),
        }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures, and the ratios of the last model to the first."""
    config = CompileConfig(target=options.target, cache="use", context=4096, random_weights=True, report=False)
    with tempfile.TemporaryDirectory() as directory:
        models = [captured_step(Path(directory), layers, options.block, config) for layers in options.layers]
    compile_once(models[0], config, options.caches)  # the first one also loads what is loaded once
    rounds: dict[int, list[dict[str, Any]]] = {model.layers: [] for model in models}
    for number in range(options.rounds):
        for model in models:
            rounds[model.layers].append(compile_once(model, config, options.caches))
            print(number, model.layers, json.dumps(rounds[model.layers][-1]), flush=True)
    rows = [
        {"layers": model.layers, "capture_seconds": model.seconds, **least(rounds[model.layers])} for model in models
    ]
    names = ("cpu_seconds", "seconds", "kernel_files", "kernel_functions", "entry_files", "nodes")
    return {"models": rows, "ratio": {name: round(rows[-1][name] / rows[0][name], 3) for name in names}}


def least(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The least seconds of the rounds; parts are those of the fastest."""
    fastest = min(rounds, key=lambda row: row["seconds"])
    return {**fastest, "cpu_seconds": min(row["cpu_seconds"] for row in rounds)}


def with_own_caches() -> int:
    """Run this again, with caches in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        environment = environment_with(**{name: str(Path(directory) / folder) for name, folder in CACHES.items()})
        command = [sys.executable, *sys.argv, "--caches", directory]
        return subprocess.run(command, env=environment, check=False).returncode


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 60])
    parser.add_argument("--block", type=int, default=12, help="layers of a block of attention residuals")
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--caches", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.caches is None:
        return with_own_caches()
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "command": f"PYTHONPATH=. python bench/layer_growth.py --layers {' '.join(map(str, options.layers))}",
        "machine": {"processors": processors(), "python": platform.python_version(), "torch": torch.__version__},
        "target": options.target,
        "block": options.block,
        "bound": BOUND,
        **measure(options),
    }
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(max(found["ratio"][name] for name in ("cpu_seconds", "kernel_functions", "entry_files")) >= BOUND)


if __name__ == "__main__":
    raise SystemExit(main())
