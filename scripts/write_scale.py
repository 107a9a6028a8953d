"""Write the tables of ``docs/scale.md`` anew, out of the cost model and, where there is one, a run on two GPUs.

``python scripts/write_scale.py`` writes; with ``--check`` it writes nothing and exits with 1 when the page is out of
date.
"""

import sys
from pathlib import Path

from kimigraph.tools.scale.tables import with_tables

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "scale.md"
MEASURED = ROOT / "bench" / "results" / "tp2_k31.json"


def main() -> int:
    """Bring the page up to date; returns the exit status."""
    old = PAGE.read_text(encoding="utf-8")
    new = with_tables(old, MEASURED)
    if "--check" in sys.argv[1:]:
        print("docs/scale.md is up to date" if new == old else "docs/scale.md is out of date: run this without --check")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
