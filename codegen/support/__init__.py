"""Files that an artifact carries as they are, beside those of ``kimigraph.ir`` that it carries too."""

from pathlib import Path

from kimigraph.ir import seeded, tensor_file


def support_files() -> dict[str, str]:
    """Text of the files under ``support/`` of an artifact, by path."""
    sources = (Path(__file__).with_name("run_step.py"), Path(seeded.__file__), Path(tensor_file.__file__))
    return {f"support/{source.name}": source.read_text(encoding="utf-8") for source in sources}
