"""Whose kernels a step's time on the device goes to: the program's own, those of libraries for products, or others."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PRODUCTS = r"gemm|gemv|nvjet|cublas|cutlass|xmma|splitK"


def kernel_names(artifact: Path) -> set[str]:
    """The names of all kernels that a program brings."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (artifact / "kernels").glob("*.py"))
    return set(re.findall(r"jit(?:\([^\n]*\))?\s*\ndef (\w+)", text))


def step_share(step: Callable[[], Any], artifact: Path, steps: int = 10) -> dict[str, Any]:
    """Microseconds a step on the device by whose kernels they are; ``part`` is that of the program's own."""
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    names = kernel_names(artifact)
    spent = {"program": 0.0, "products": 0.0, "other": 0.0}
    own, others = dict[str, float](), dict[str, float]()
    for event in profiler.key_averages():
        micros = event.self_device_time_total / steps
        if event.key in names:
            spent["program"] += micros
            own[event.key] = round(micros, 2)
        elif re.search(PRODUCTS, event.key):
            spent["products"] += micros
        else:
            spent["other"] += micros
            others[event.key[:90]] = round(micros, 2)
    total = sum(spent.values()) or 1.0
    rounded: dict[str, Any] = {name: round(value, 2) for name, value in spent.items()}
    return {**rounded, "part": round(spent["program"] / total, 4), "own": _most(own, 6), "rest": _most(others, 4)}


def _most(spent: dict[str, float], count: int) -> dict[str, float]:
    return dict(sorted(spent.items(), key=lambda item: -item[1])[:count])
