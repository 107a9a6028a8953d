"""The table in ``docs/fusions.md`` is what the passes declare."""

import re
from pathlib import Path

import pytest

from kimigraph.ir.errors import UsageError
from kimigraph.ir.operators import OPERATORS
from kimigraph.passes import registered_passes
from kimigraph.passes.registry import BUILT_IN
from kimigraph.tools.fusion_table import fusion_table, with_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fusions.md"


def test_the_page_is_fresh() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text), "run python scripts/write_fusions.py"


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_pass_declares_all_columns(name: str) -> None:
    kind = registered_passes()[name]
    assert kind.pattern and kind.constraints and kind.effect
    [row] = [line for line in fusion_table().splitlines() if line.startswith(f"| `{name}`")]
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    assert len(cells) == 5 and cells[1] == kind.pattern and cells[4] == f"`-O{kind.level}` and up"
    if kind.fusion and kind.level == 1:  # later passes make no operator
        operator = re.match(r"`(\w+)`", kind.effect)
        assert operator is not None and operator[1] in OPERATORS


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(UsageError, match="no place for the table"):
        with_table("# Fusions\n")


def test_only_the_part_between_the_marks_changes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    spoiled = text.replace("\n| `raise-kda` | a write", "\n| `raise-kda` | a read", 1)
    assert spoiled != text and with_table(spoiled) == text
