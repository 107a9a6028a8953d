"""How long the GPU does nothing inside a decode step of Kimi K3.1 at width, and before which kernels.

    PYTHONPATH=. python bench/idle.py --layers 4 --batch 1 8 --context 32768 --out bench/results/idle.json

A step is replayed as one CUDA graph under torch's profiler; the gaps between its kernels are what the trace says. As
the profiler widens gaps, though not kernels, they count a second time against a step without it. Targets:
gaps beyond 1 us each (what a dependent kernel costs) under 5 % of the step, all gaps together under 12 %.
``--timelines DIR`` writes planned and measured schedule of each row for Perfetto.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from k31_decode import example, program_of, random_model
from run_facts import run_facts

from kimigraph.bench.protocol import require_gpu, time_in_graph
from kimigraph.bench.replay import named_replay
from kimigraph.capture import capture_module
from kimigraph.capture.named_caches import named_cache_hints
from kimigraph.capture.program import tensors_of
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.device import device_for
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.trace import write_timeline
from kimigraph.passes.scheduling.planned import planned_track
from kimigraph.tools.idle import ALLOWED_US, Idle, idle_of
from kimigraph.tools.measured import measured_track

FORMS: dict[str, dict[str, Any]] = {
    "one stream": {"streams": 1},
    "streams that pay": {},
    "streams forced": {"force_streams": True},
}
SUFFIXES = {"one stream": "_one_stream", "streams that pay": "", "streams forced": "_forced"}
CALLS = 4
"""Steps in the graph that is timed: its launch counts once among them."""


def measured(
    captured: CapturedProgram, config: CompileConfig, args: Any, scratch: Path, timeline: Path | None
) -> dict[str, Any]:
    """One form of the step: times, gaps, and the longest of them by name."""
    executor, program, facts = program_of(captured, config, scratch)
    flat = [t for s, t in zip(captured.inputs, tensors_of(captured, args, {}), strict=True) if not s.bound]

    def step() -> Any:
        return executor(*flat)

    replay, names, graph = named_replay(scratch, step)
    untraced = time_in_graph([step], at_least=CALLS, replays=31).median
    del graph
    idle = idle_of(replay)
    planned = planned_track(program.graph_module.graph, device_for(config)).without("source")
    if timeline is not None:
        title = f"measured: one replay on {torch.cuda.get_device_name()}"
        write_timeline(timeline, [planned, measured_track(replay, names, planned, title)])
    gaps = sorted(idle.gaps, key=lambda gap: -gap.length)[:12]
    return {
        "launches": facts["launches"],
        "events": len(replay),
        "unnamed": names.count(""),
        "streams": len(planned.lanes),
        "planned_us": round(planned.length, 2),
        "step_us": round(untraced, 2),
        "trace": idle.as_dict(),
        "untraced": against(idle, untraced),
        "longest_gaps": [{"before": names[gap.before], "us": round(gap.length, 2)} for gap in gaps],
        "kernels": [
            {"node": name, "kernel": event.name[:60], "stream": event.stream, "us": round(event.length, 2)}
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


def rows_of(batch: int, options: argparse.Namespace, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """All forms of one batch."""
    config = CompileConfig(target="cuda", batch=batch, context=options.context, opt_level=options.level)
    model = random_model(options.layers, torch.bfloat16)
    args = example(model, batch, options.context)
    captured = capture_module(model, args, {}, config, named_cache_hints(model, args, {}))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        for number, (form, changes) in enumerate(FORMS.items()):
            name = f"k31_step_b{batch}{SUFFIXES[form]}.json"
            timeline = None if options.timelines is None else options.timelines / name
            found = measured(captured, replace(config, **changes), args, Path(scratch) / str(number), timeline)
            rows.append({"batch": batch, "context": options.context, "layers": options.layers, "form": form, **found})
            trace, untraced = found["trace"], found["untraced"]
            say(
                f"B {batch} {form}: {found['step_us']:.1f} us a step, {found['events']} kernels; idle in the trace "
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
    parser.add_argument("--timelines", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    require_gpu()
    if options.timelines is not None:
        options.timelines.mkdir(parents=True, exist_ok=True)
    rows = [row for batch in options.batch for row in rows_of(batch, options, lambda text: print(text, flush=True))]
    document = {
        **run_facts(),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
