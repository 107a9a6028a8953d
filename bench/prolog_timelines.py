"""The input preparation of an indexer on this machine's GPU, serial, split and merged, as timelines.

    PYTHONPATH=. python bench/prolog_timelines.py --batch 1 --out bench/results/timelines

Writes ``prolog_b<batch>.json`` for Perfetto: of each form the planned schedule and a measured replay; ``--planned``
needs no GPU and leaves the replays out. ``python scripts/write_timelines.py`` makes the pictures of ``docs/timelines``
out of it. ``--times FILE`` keeps the times that ``kimigraph bench prolog --only indexer`` has, of the same programs.
``--programs DIR`` keeps these there, ``--build`` does no more than that.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from run_facts import run_facts

from kimigraph.bench.indexer_prolog import built_forms, line, planned_tracks, point
from kimigraph.bench.protocol import require_gpu
from kimigraph.ir.trace import write_timeline


def main() -> None:
    """Measure every batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--planned", action="store_true")
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.build and options.programs is None:
        parser.error("--build compiles what --programs keeps: say where, --programs DIR")
    if not options.planned:
        require_gpu()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for batch in options.batch:
        out = options.out / f"prolog_b{batch}.json"
        if options.planned:
            write_timeline(out, planned_tracks(batch))
        elif options.build:
            built_forms(batch, options.programs)
        else:
            rows.append(point(batch, out, options.programs))
            print(line(rows[-1]), flush=True)
        if options.times is not None and rows:
            document = {**run_facts(), "indexer prolog": rows}
            options.times.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
