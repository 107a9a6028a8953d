"""How long the GPU does nothing inside a decode step of Kimi K3.1 at width, and before which kernels.

    PYTHONPATH=. python bench/idle.py --layers 4 --batch 1 8 --context 32768 --out bench/results/idle.json

A step is replayed as one CUDA graph under torch's profiler; the gaps between its kernels are what the trace says. As
the profiler widens gaps, though not kernels, they count a second time against a step without it. Targets:
gaps beyond 1 us each (what a dependent kernel costs) under 5 % of the step, all gaps together under 12 %.
``--timelines DIR`` writes planned and measured schedule of each row for Perfetto, ``--programs DIR`` keeps programs.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run_facts import run_facts
from step_programs import FORMS, USUAL, StepProgram, StepPrograms, kept_in

from kimigraph.bench.protocol import require_gpu, time_in_graph
from kimigraph.bench.replay import named_replay
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.trace import write_timeline
from kimigraph.tools.idle import ALLOWED_US, Idle, idle_of
from kimigraph.tools.measured import measured_track

TITLES = {"one": "one stream", "paying": "streams that pay", "forced": "streams forced", "halves": "two half-batches"}
SUFFIXES = {"one": "_one_stream", "paying": "", "forced": "_forced", "halves": "_halves"}
CALLS = 4
"""Steps in the graph that is timed: its launch counts once among them."""


def measured(program: StepProgram, given: list[torch.Tensor], timeline: Path | None) -> dict[str, Any]:
    """One form of the step: times, gaps, and the longest of them by name."""

    def step() -> Any:
        return program.executor(*given)

    replay, names, graph = named_replay(program.directory, step)
    untraced = time_in_graph([step], at_least=CALLS, replays=31).median
    del graph
    idle, planned = idle_of(replay), program.planned
    if timeline is not None:
        title = f"measured: one replay on {torch.cuda.get_device_name()}"
        write_timeline(timeline, [planned, measured_track(replay, names, planned, title)])
    gaps = sorted(idle.gaps, key=lambda gap: -gap.length)[:12]
    return {
        "target": program.facts["target"],
        "launches": program.facts["launches"],
        "events": len(replay),
        "unnamed": names.count(""),
        "streams": program.facts["streams"],
        "planned_us": round(planned.length, 2),
        "step_us": round(untraced, 2),
        "trace": idle.as_dict(),
        "untraced": against(idle, untraced),
        "longest_gaps": [{"before": names[gap.before], "us": round(gap.length, 2)} for gap in gaps],
        "kernels": [
            {
                "node": name,
                "kernel": event.name[:60],
                "stream": event.stream,
                "at": round(event.start - replay[0].start, 2),
                "us": round(event.length, 2),
            }
            for event, name in zip(replay, names, strict=True)
        ],
    }


def against(idle: Idle, step: float) -> dict[str, float]:
    """Idle time of a step that the profiler does not slow: all that is not kernel time, and what exceeds 1 us a gap."""
    total = max(step - idle.busy, 0.0)
    beyond = max(total - ALLOWED_US * len(idle.gaps), 0.0)
    return {
        "idle_us": round(total, 2),
        "idle_share": round(total / step, 4),
        "beyond_us": round(beyond, 2),
        "beyond_share": round(beyond / step, 4),
    }


def rows_of(batch: int, kept: Path, options: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """All forms of one batch."""
    shape = CompileConfig(batch=batch, context=options.context, opt_level=options.level)
    programs = StepPrograms(shape, options.layers, kept)
    rows: list[dict[str, Any]] = []
    for form in options.forms:
        timeline = None if options.timelines is None else options.timelines / f"k31_step_b{batch}{SUFFIXES[form]}.json"
        with torch.no_grad():
            found = measured(programs.program(form), programs.given, timeline)
        row = {"batch": batch, "context": options.context, "layers": options.layers, "form": TITLES[form]}
        rows.append({**row, **found})
        trace, untraced = found["trace"], found["untraced"]
        say(
            f"B {batch} {TITLES[form]}: {found['step_us']:.1f} us a step, {found['events']} kernels; idle in the trace "
            f"{trace['idle_share']:.1%} ({trace['beyond_share']:.1%} beyond 1 us), without profiler "
            f"{untraced['idle_share']:.1%} ({untraced['beyond_share']:.1%})"
        )
    return rows


def main() -> None:
    """Measure every batch size and write one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=USUAL)
    parser.add_argument("--timelines", type=Path)
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    require_gpu()
    if options.timelines is not None:
        options.timelines.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {**run_facts(), "rows": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with kept_in(options.programs) as kept:
        for batch in options.batch:
            document["rows"] += rows_of(batch, kept, options, lambda text: print(text, flush=True))
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
