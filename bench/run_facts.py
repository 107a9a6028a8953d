"""What a document of ``bench/results/`` says about the run that made it."""

import platform
import sys
from typing import Any

import torch


def run_facts() -> dict[str, Any]:
    """The command, the GPU and the versions."""
    return {
        "command": "PYTHONPATH=. python " + " ".join(sys.argv),
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
