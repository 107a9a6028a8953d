"""Which architecture a target's kernels are compiled for, and when."""

import re

import torch

from kimigraph.ir import env
from kimigraph.ir.config import ONNXRUNTIME, TARGETS
from kimigraph.ir.errors import UsageError


def ahead_of_time_arch(target: str) -> int | None:
    """90 for ``cuda:sm_90``, None for a target that says no architecture; UsageError for other text."""
    if target in ("cpu", "cpu:reference", ONNXRUNTIME, "cuda"):
        return None
    match = re.fullmatch(r"cuda:sm_(\d{2,3})", target)
    if match is None:
        raise UsageError(f"unknown target {target!r}: choose {', '.join(TARGETS[:-1])} or {TARGETS[-1]}")
    return int(match[1])


def cubin_arch(target: str) -> int | None:
    """The architecture that an artifact of ``target`` holds cubins for: for ``cuda`` that of the device here.

    None: it holds none. Its kernels are interpreted, or compiled where there is a device.
    """
    if target != "cuda":
        return ahead_of_time_arch(target)
    if not torch.cuda.is_available() or env.interpreting():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
