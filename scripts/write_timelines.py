"""Write the pictures of ``docs/timelines`` out of the timelines that benches left in ``bench/results/timelines``.

``python scripts/write_timelines.py`` writes, with ``--check`` it only says what is out of date, with exit status 1.
Each JSON file (one that Perfetto opens) becomes the picture of the same name: its tracks below one another, to one
scale.
"""

import argparse
import sys
from pathlib import Path

from kimigraph.ir.trace import read_timeline
from kimigraph.report.timeline_svg import Window, timeline_svg

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "bench" / "results" / "timelines"
PICTURES = ROOT / "docs" / "timelines"


def pictures() -> dict[Path, str]:
    """The text of each picture."""
    found: dict[Path, str] = {}
    for source in sorted(SOURCES.glob("*.json")):
        tracks = read_timeline(source)
        title = source.stem.replace("_", " ")
        found[PICTURES / f"{source.stem}.svg"] = timeline_svg(title, [(track, Window.whole(track)) for track in tracks])
    return found


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    stale = False
    for path, text in pictures().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale = True
        print(f"{path.relative_to(ROOT)}: {'out of date' if options.check else 'written'}")
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    sys.exit(1 if options.check and stale else 0)


if __name__ == "__main__":
    main()
