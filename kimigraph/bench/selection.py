"""The documents of ``kimigraph bench li`` and ``kimigraph bench sfa``."""

from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

import torch

from kimigraph.bench import lightning_indexer, sparse_attention
from kimigraph.bench.kda import machine
from kimigraph.ir.errors import UsageError


def run(subject: str, peers: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """All points of ``subject``, li or sfa. The document for ``--json``.

    Raises UsageError without a GPU and NumericsError when our result is wrong at a point.
    """
    if not torch.cuda.is_available():
        raise UsageError("kimigraph bench needs an NVIDIA GPU, and torch sees none here")
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": machine(), "points": []}
    measure = lightning_indexer.point if subject == "li" else sparse_attention.point
    points = lightning_indexer.POINTS if subject == "li" else sparse_attention.POINTS
    for first, second in points:
        document["points"].append(measure(first, second, peers))
        say(line(document["points"][-1]))
    document["geometric_mean_ratio"] = {}
    for name in peers:
        ratios = [peer["ratio"] for one in document["points"] if "ratio" in (peer := one["peers"].get(name, {}))]
        if ratios:
            document["geometric_mean_ratio"][name] = round(geometric_mean(ratios), 3)
            say(f"{name}: geometric mean of the ratios {geometric_mean(ratios):.3f}, worst {min(ratios):.3f}")
    return document


def line(point: dict[str, Any]) -> str:
    """A point for people."""
    shape = f"L {point['length']} k {point['k']}" if "length" in point else f"H {point['heads']}"
    us = point["ours"]["us"]
    error = f", error {point['ours']['error']:.1e}" if "error" in point["ours"] else ""
    text = f"B {point['batch']} {shape}: {us['median']:.2f} us ({us['least']:.2f}-{us['most']:.2f}){error}"
    text += f", floor {point['floor_us']:.2f}"
    for name, peer in point["peers"].items():
        text += f" | {name} " + (
            f"{peer['us']['median']:.2f} us, ratio {peer['ratio']:.2f}" if "us" in peer else peer["unavailable"]
        )
    return text
