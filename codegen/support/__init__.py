"""Files that an artifact carries as they are, beside those of ``kimigraph.ir`` that it carries too."""

from pathlib import Path

from kimigraph.ir import preparation, ranks, seeded, shares, tensor_file


def support_files(
    ahead_of_time: bool = False, streams: int = 1, arena: bool = False, several: bool = False
) -> dict[str, str]:
    """Text of the files under ``support/`` of an artifact, by path.

    What launches cubins is there where it holds some, what forks and joins where its program has several streams, the
    arena where its memory is planned, and what joins ranks where it is for several.
    """
    sources = [Path(__file__).with_name("run_step.py")]
    sources += [Path(str(module.__file__)) for module in (seeded, tensor_file, preparation)]
    if ahead_of_time:
        sources += [Path(__file__).with_name(name) for name in ("cubins.py", "cuda_driver.py")]
    if streams > 1:
        sources.append(Path(__file__).with_name("streams.py"))
    if arena:
        sources.append(Path(__file__).with_name("arena.py"))
    if several:
        sources += [Path(str(module.__file__)) for module in (ranks, shares)]
    return {f"support/{source.name}": source.read_text(encoding="utf-8") for source in sources}
