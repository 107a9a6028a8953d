"""The documents of ``kimigraph bench li`` and ``kimigraph bench sfa``."""

from collections.abc import Callable, Sequence
from statistics import geometric_mean
from typing import Any

import torch

from kimigraph.bench import indexer_prefill, lightning_indexer, sparse_attention
from kimigraph.bench.kda import machine
from kimigraph.bench.protocol import require_gpu


def run(subject: str, peers: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """All points of ``subject``, li or sfa. The document for ``--json``.

    Raises UsageError without a GPU and NumericsError when our result is wrong at a point.
    """
    require_gpu()
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": machine(), "points": []}
    measure: Callable[..., dict[str, Any]] = lightning_indexer.point if subject == "li" else sparse_attention.point
    points = lightning_indexer.POINTS if subject == "li" else sparse_attention.POINTS
    for shape in points:
        document["points"].append(measure(*shape, peers))
        say(line(document["points"][-1]))
    for length in indexer_prefill.POINTS if subject == "li" else ():
        document.setdefault("prefill", []).append(indexer_prefill.point(length, peers))
        say(line({**document["prefill"][-1], "batch": 1}))
    document["geometric_mean_ratio"] = {}
    for name in peers:
        for picks in sorted({one["k"] for one in document["points"] if "k" in one}) or [None]:
            some = [one["peers"].get(name, {}) for one in document["points"] if one.get("k") == picks]
            ratios = [peer["ratio"] for peer in some if "ratio" in peer]
            if ratios:
                title = name if picks is None else f"{name}, k {picks}"
                document["geometric_mean_ratio"][title] = round(geometric_mean(ratios), 3)
                say(f"{title}: geometric mean of the ratios {geometric_mean(ratios):.3f}, worst {min(ratios):.3f}")
    return document


def line(point: dict[str, Any]) -> str:
    """A point for people."""
    shape = f"L {point['length']} k {point['k']}" if "length" in point else f"H {point['heads']}"
    shape = f"{point['rows']} rows {shape}" if "rows" in point else shape
    shape = f"{shape} all of {point['context']} rows" if "context" in point else shape
    us = point["ours"]["us"]
    error = f", error {point['ours']['error']:.1e}" if "error" in point["ours"] else ""
    text = f"B {point['batch']} {shape}: {us['median']:.2f} us ({us['least']:.2f}-{us['most']:.2f}){error}"
    text += f", floor {point['floor_us']:.2f}"
    text += f", {point['ours']['route']}" if "route" in point["ours"] else ""
    for name, peer in point["peers"].items():
        text += f" | {name} " + (
            f"{peer['us']['median']:.2f} us, ratio {peer['ratio']:.2f}" if "us" in peer else peer["unavailable"]
        )
    return text
