"""Write the table of passes in ``docs/fusions.md`` anew, out of what the passes declare.

``python scripts/write_fusions.py`` writes; with ``--check`` it writes nothing and exits with 1 when the page is out of
date.
"""

import sys
from pathlib import Path

from kimigraph.tools.fusion_table import with_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "fusions.md"


def main() -> int:
    """Bring the page up to date; returns the exit status."""
    old = PAGE.read_text(encoding="utf-8")
    new = with_table(old)
    if "--check" in sys.argv[1:]:
        print(
            "docs/fusions.md is up to date"
            if new == old
            else "docs/fusions.md is out of date: run this without --check"
        )
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
