"""The input preparation of an indexer on this machine's GPU, serial, split and merged, as timelines.

    PYTHONPATH=. python bench/prolog_timelines.py --batch 1 --out bench/results/timelines

Writes ``prolog_b<batch>.json`` for Perfetto: of each form the planned schedule and a measured replay; ``--planned``
needs no GPU and leaves the replays out. ``python
scripts/write_timelines.py`` makes the pictures of ``docs/timelines`` out of it; ``kimigraph bench prolog`` has times.
"""

import argparse
from pathlib import Path

from kimigraph.bench.indexer_prolog import line, planned_tracks, point
from kimigraph.bench.protocol import require_gpu
from kimigraph.ir.trace import write_timeline


def main() -> None:
    """Measure every batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--planned", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if not options.planned:
        require_gpu()
    options.out.mkdir(parents=True, exist_ok=True)
    for batch in options.batch:
        out = options.out / f"prolog_b{batch}.json"
        if options.planned:
            write_timeline(out, planned_tracks(batch))
        else:
            print(line(point(batch, out)), flush=True)


if __name__ == "__main__":
    main()
