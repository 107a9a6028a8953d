"""What dumps, remarks and the report add to the time of a compilation, as a ratio within one run.

    PYTHONPATH=. python bench/report_cost.py --out bench/results/report_cost.json

A K3.1 graph of ``--layers`` layers (small widths) is captured once, then compiled by turns with everything off and with
everything on: dumps into a directory, remarks, ``report.html``. Two ratios are told: of passes and code generation
alone, which is the hard one, and with the capture, which is what a user waits for. Last, the dumps of a graph of some
5,000 nodes are timed by themselves.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kimigraph.capture import capture, load_source
from kimigraph.compiler import build, keep
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import DumpPasses, PassContext, default_pipeline, run_pipeline
from kimigraph.report import render_report
from kimigraph.session import new_session
from kimigraph.tools.publish import publish

EXAMPLE = Path(__file__).parent.parent / "examples" / "k31_tiny" / "config.json"
ALLOWED_RATIO = 0.30
ALLOWED_SECONDS = 10.0


def model_directory(root: Path, layers: int) -> Path:
    """A model directory as ``examples/k31_tiny``, with that many layers, every fourth one with full attention."""
    document = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    document["num_hidden_layers"] = layers
    document["linear_attn_config"]["full_attn_layers"] = [n for n in range(1, layers + 1) if n % 4 == 0]
    document["linear_attn_config"]["kda_layers"] = [n for n in range(1, layers + 1) if n % 4]
    directory = root / f"k31_{layers}"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return directory


def captured_model(root: Path, layers: int, config: CompileConfig) -> tuple[CapturedProgram, float]:
    """The captured decode step and the seconds that it took."""
    start = time.perf_counter()
    program = capture(load_source(str(model_directory(root, layers)), config), config)
    return program, time.perf_counter() - start


def compile_seconds(program: CapturedProgram, config: CompileConfig) -> tuple[float, int]:
    """Seconds from the captured program to the finished artifact, and the bytes of its report (0 without)."""
    with tempfile.TemporaryDirectory() as directory:
        artifact = Path(directory) / "artifact"
        artifact.mkdir()
        if config.report:
            config = replace(config, dump_passes=str(Path(directory) / "dumps"))
        start = time.perf_counter()
        with new_session(config, lambda message: None) as session:
            report, finished = build(program, artifact, session)
            keep(None, finished, report, session)
            if config.report:
                publish(report, artifact, session.shown, session.asked)
        seconds = time.perf_counter() - start
        page = artifact / "report.html"
        return seconds, page.stat().st_size if page.is_file() else 0


class TimedDumps(DumpPasses):
    """Adds up the seconds that dumping takes."""

    spent = 0.0

    def before_pipeline(self, *event: Any) -> None:
        """Timed."""
        self._timed(super().before_pipeline, event)

    def after_pass(self, *event: Any) -> None:
        """Timed."""
        self._timed(super().after_pass, event)

    def _timed(self, call: Any, event: tuple[Any, ...]) -> None:
        start = time.perf_counter()
        call(*event)
        self.spent += time.perf_counter() - start


def dump_seconds(program: CapturedProgram, config: CompileConfig) -> dict[str, float]:
    """Seconds to dump the program after every pass, and to write the report from the dumps."""
    with tempfile.TemporaryDirectory() as directory:
        dumps = TimedDumps(Path(directory) / "dumps")
        run_pipeline(program.copy(), default_pipeline(config), PassContext(config), [dumps])
        start = time.perf_counter()
        render_report({}, dumps.directory)
        return {"dumps": dumps.spent, "report": time.perf_counter() - start}


def measure(layers: int, small: int, rounds: int) -> dict[str, Any]:
    """All figures of one run."""
    config = CompileConfig(target="cpu:reference", cache="off", context=64, report=False)
    with tempfile.TemporaryDirectory() as directory:
        program, capture_seconds = captured_model(Path(directory), layers, config)
        compile_seconds(program, config)  # the first one also loads what is loaded once
        off: list[float] = []
        on: list[float] = []
        size = 0
        for _ in range(rounds):
            off.append(compile_seconds(program, config)[0])
            seconds, size = compile_seconds(program, replace(config, report=True))
            on.append(seconds)
        fewer, _ = captured_model(Path(directory), small, config)
        spent = dump_seconds(fewer, config)
    added = statistics.median(on) - statistics.median(off)
    return {
        "layers": layers,
        "nodes": len(program.graph_module.graph.nodes),
        "capture_seconds": capture_seconds,
        "off_seconds": off,
        "on_seconds": on,
        "ratio_without_capture": added / statistics.median(off),
        "ratio": added / (capture_seconds + statistics.median(off)),
        "report_bytes": size,
        "dump_nodes": len(fewer.graph_module.graph.nodes),
        "dump_seconds": spent,
    }


def main() -> int:
    """Measure, print, write; exit status 1 when a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--dump-layers", type=int, default=22, help="layers of the graph of some 5,000 nodes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options.layers, options.dump_layers, options.rounds)
    found["machine"] = {"cpu": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    found["bounds"] = {"ratio": ALLOWED_RATIO, "dump_seconds": ALLOWED_SECONDS}
    print(json.dumps(found, indent=1))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(found["ratio"] >= ALLOWED_RATIO or found["dump_seconds"]["dumps"] >= ALLOWED_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
