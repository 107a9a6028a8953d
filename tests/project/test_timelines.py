"""The pictures of docs/timelines are those of the timelines that the benches left."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pictures_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("write_timelines", ROOT / "scripts" / "write_timelines.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    pictures = script.pictures()
    assert pictures
    stale = [path.name for path, text in pictures.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run python scripts/write_timelines.py"
    for source in script.SOURCES.glob("*.json"):
        assert '"source"' not in source.read_text(encoding="utf-8"), "source lines name files of one machine"
