"""Several shapes of one source: side by side, each in its own directory, with one error that stops all."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.tools.shapes import compile_shapes, config_of

CONFIG = CompileConfig(target="cpu:reference", context=16, report=False, overrides=(("index_topk", "4"),))


class Watcher:
    def __init__(self) -> None:
        self.said: list[tuple[int, str]] = []
        self.finished: list[int] = []

    def say(self, shape: int, message: str) -> None:
        self.said.append((shape, message))

    def done(self, shape: int) -> None:
        self.finished.append(shape)


@pytest.mark.parametrize("jobs", [1, 2])
def test_each_shape_lands_in_its_directory_and_in_order(kimi: str, tmp_path: Path, jobs: int) -> None:
    watcher = Watcher()
    configs = [replace(CONFIG, batch=batch) for batch in (2, 1)]
    reports = compile_shapes(kimi, configs, tmp_path / "out", watcher, jobs)
    assert [report.shape_key for report in reports] == ["decode-b2-t1-c16", "decode-b1-t1-c16"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["decode-b1-t1-c16", "decode-b2-t1-c16"]
    assert [report.artifact for report in reports] == [str(tmp_path / "out" / r.shape_key) for r in reports]
    assert sorted(watcher.finished) == [0, 1]
    assert {shape for shape, message in watcher.said if message.startswith("capturing")} == {0, 1}


def test_the_error_of_a_worker_is_raised_as_it_is(kimi: str, tmp_path: Path) -> None:
    configs = [replace(CONFIG, batch=1), replace(CONFIG, context=1000)]
    with pytest.raises(UsageError, match="--context 1000 is more than the model's max_position_embeddings"):
        compile_shapes(kimi, configs, tmp_path / "out", Watcher(), 2)


def test_a_configuration_survives_the_way_to_a_worker() -> None:
    from dataclasses import asdict

    config = replace(CONFIG, disabled_passes=("raise-kda",), required_fusions=())
    assert config_of(json.loads(json.dumps(asdict(config)))) == config
