"""``kimigraph bench attnres`` up to the device."""

from typing import Any

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_remedy_is_named(cli: Any) -> None:
    done = cli("bench", "attnres")
    assert done.exit_code == 2 and "needs an NVIDIA GPU" in done.stderr


def test_other_peers_are_refused(cli: Any) -> None:
    done = cli("bench", "attnres", "--only", "flash_mla")
    assert done.exit_code == 2 and "--only flash_mla: choose fla, vllm, torch_compile" in " ".join(done.stderr.split())
