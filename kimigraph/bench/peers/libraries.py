"""Operator libraries of vLLM, loaded by file: importing vLLM itself is not needed and brings much else."""

import importlib.util
import sys
from pathlib import Path

import torch

from kimigraph.bench.peers import PeerUnavailableError


def load(name: str) -> None:
    """Load ``<name>.abi3.so`` from an installed vLLM or from a folder of the module path."""
    found = importlib.util.find_spec("vllm")
    folders = [*(found.submodule_search_locations or [] if found else []), *sys.path]
    for folder in folders:
        path = Path(folder) / f"{name}.abi3.so"
        if path.is_file():
            torch.ops.load_library(str(path))
            return
    raise PeerUnavailableError(f"{name}.abi3.so not found: install vllm, or put the file into a folder of PYTHONPATH")
