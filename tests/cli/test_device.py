"""``compile --device-file`` and ``measure-device``."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kimigraph.cli.compile import configurations
from kimigraph.ir.device import device_for, target_device


@pytest.fixture
def options() -> dict[str, Any]:
    """What the command hands over when nothing was typed but SOURCE."""
    import inspect

    from kimigraph.cli.compile import parameters

    return {p.name: p.default for p in parameters() if p.default is not inspect.Parameter.empty}


def test_a_device_file_becomes_part_of_the_configuration(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps(json.loads(target_device("cuda").text()) | {"name": "another"}))
    [config] = configurations(options | {"device_file": path, "target": "cuda"})
    assert device_for(config).name == "another"
    [config] = configurations(options | {"target": "cuda"})
    assert config.device is None and device_for(config).name == "NVIDIA H200"


def test_a_broken_device_file_is_a_usage_error(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps(json.loads(target_device("cuda").text()) | {"bytes_per_second": -1}))
    done = cli("compile", "nothing", "--device-file", str(path))
    assert done.exit_code == 2 and "bytes_per_second is -1" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures where there is a GPU")
def test_measuring_needs_a_gpu(cli: Any, tmp_path: Path) -> None:
    done = cli("measure-device", "--out", str(tmp_path / "device.json"))
    assert done.exit_code == 2 and "needs a CUDA device" in done.stderr
    assert not (tmp_path / "device.json").exists()
