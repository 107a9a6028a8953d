"""Recall of quantised indexers: which of the top k of plain scores they pick, on data of several kinds.

``PYTHONPATH=. python bench/recall.py [--keys 32768] [--k 2048] [--out FILE]``, on a CPU. Each format runs through the
operators (cache bytes, quantised queries, the indexer on them) and through a simulation in numpy that shares no code
with them.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kimigraph.ir.cache_formats import pack, quantised_keys, quantised_spec
from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.policy import Format
from kimigraph.ir.program import InputSpec

HEADS, WIDTH = 64, 128
FORMATS = {
    "mxfp8 group 32": Format("mxfp8", 32),
    "mxfp8 group 128": Format("mxfp8", 128),
    "fp8 per key, power2": Format("fp8", 128, "power2"),
    "fp8 per key, amax": Format("fp8", 128, "amax"),
}


def gaussian(rows: int, keys: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys without any structure: the hardest case, as scores crowd around the cut."""
    return torch.randn(1, rows, HEADS, WIDTH, generator=random), torch.randn(1, keys, WIDTH, generator=random)


def correlated(rows: int, keys: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that mix 8 topics, and queries that ask for a mixture of them, every head for much the same."""
    topics = torch.randn(8, WIDTH, generator=random)
    asked = torch.randn(rows, 1, 8, generator=random) + 0.1 * torch.randn(rows, HEADS, 8, generator=random)
    q = asked @ topics + 0.1 * torch.randn(rows, HEADS, WIDTH, generator=random)
    shares = torch.randn(keys, 8, generator=random)
    return q.unsqueeze(0), (shares @ topics + 0.1 * torch.randn(keys, WIDTH, generator=random)).unsqueeze(0)


def outliers(rows: int, keys: int, random: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussian, with four channels of the keys 50 times as large."""
    q, k = gaussian(rows, keys, random)
    k[..., [3, 40, 77, 120]] *= 50
    return q, k


KINDS: dict[str, Callable[[int, int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]] = {
    "gaussian": gaussian,
    "correlated": correlated,
    "four channels x 50": outliers,
}


def picks_of_operators(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, k: int, form: Format, rotation: str
) -> torch.Tensor:
    """The top k by the operators: bytes in the cache, quantised queries."""
    plain = IndexKeyDescriptor("contiguous", "float32", WIDTH)
    spec = InputSpec("keys", "cache", "keys", tuple(keys.shape), keys.stride(), "float32", descriptor=str(plain))
    packed = quantised_spec(spec, quantised_keys(plain, form, rotation))
    ops, rotate = torch.ops.kimigraph, rotation != "none"
    more: dict[str, Any] = {"k": k, "scale": 1.0, "descriptor": packed.descriptor}
    cache = pack(packed, {"keys": keys})
    if form.kind == "mxfp8":
        codes, scales = ops.mxfp8_quantize(q, group=form.group, rotate=rotate)
        return ops.lightning_indexer(codes, cache, weights, q_scales=scales, **more)
    values, scales = ops.fp8_quantize(q, tile=WIDTH, scales=form.scales, rotate=rotate)
    return ops.lightning_indexer(values, cache, weights * scales.squeeze(-1), **more)


def simulated(values: torch.Tensor, form: Format) -> torch.Tensor:
    """Values after the format, by a table of E4M3 and the mantissa and exponent of each group's largest magnitude."""
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    table = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    middles = (table[1:] + table[:-1]) / 2
    groups = values.double().numpy().reshape(*values.shape[:-1], -1, form.group)
    largest = np.abs(groups).max(-1, keepdims=True)
    if form.kind == "mxfp8" or form.scales == "power2":
        fraction, power = np.frexp(largest)
        scale = np.ldexp(1.0, power - np.where(fraction <= 0.875, 9, 8))  # 448 is 0.875 * 2 ** 9
    else:
        scale = (largest.astype(np.float32) / np.float32(448)).astype(np.float64)
    scaled = np.abs((groups / scale).astype(np.float32)).astype(np.float64)
    below = np.searchsorted(middles, scaled, side="left")
    tied = (below < len(middles)) & (scaled == middles[np.minimum(below, len(middles) - 1)])
    code = np.where(tied & (below % 2 == 1), below + 1, below)
    return torch.from_numpy((np.sign(groups) * table[code] * scale).reshape(values.shape)).float()


def plain_picks(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, k: int) -> torch.Tensor:
    """The top k of fp32 scores."""
    return torch.ops.kimigraph.lightning_indexer(q, keys, weights, k=k, scale=1.0)


def recall(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The share of the wanted picks that were found."""
    pairs = zip(found.flatten(0, -2), wanted.flatten(0, -2), strict=True)
    return sum(int(torch.isin(got, want).sum()) for got, want in pairs) / wanted.numel()


def measure(rows: int, keys: int, k: int, seed: int) -> list[dict[str, Any]]:
    """One record for each kind of data and format."""
    records: list[dict[str, Any]] = []
    for kind, make in KINDS.items():
        random = torch.Generator().manual_seed(seed)
        q, cached = make(rows, keys, random)
        weights = torch.randn(1, rows, HEADS, generator=random)
        weights = weights.abs() if kind == "correlated" else weights  # heads agree
        wanted = plain_picks(q, cached, weights, k)
        for name, form in FORMATS.items():
            record: dict[str, Any] = {"data": kind, "format": name}
            record["recall"] = recall(picks_of_operators(q, cached, weights, k, form, "none"), wanted)
            other = plain_picks(simulated(q, form), simulated(cached, form), weights, k)
            record["simulation"] = recall(other, wanted)
            record["rotated"] = recall(picks_of_operators(q, cached, weights, k, form, "hadamard"), wanted)
            records.append({key: round(v, 5) if isinstance(v, float) else v for key, v in record.items()})
            print(*records[-1].values(), flush=True)
    return records


def main() -> None:
    """Measure and print; write the document where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--keys", type=int, default=32768)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    assert "lightning_indexer" in OPERATORS
    records = measure(asked.rows, asked.keys, asked.k, asked.seed)
    document = {
        "command": f"PYTHONPATH=. python bench/recall.py --rows {asked.rows} --keys {asked.keys} --k {asked.k}",
        "records": records,
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
