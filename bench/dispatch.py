"""Host time from a call of a compiled model to its program: a known shape, as many caches as K3.1 has.

    PYTHONPATH=. python bench/dispatch.py --layers 16 --out bench/results/dispatch.json

The model does next to nothing; its program called directly, without dispatch, is subtracted.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kimigraph
from kimigraph.ir.config import CompileConfig


class Touch(nn.Module):
    """Reads every cache's first element as a view, computes one sum."""

    def forward(self, ids: Tensor, lengths: Tensor, cache: dict[str, Tensor]) -> Tensor:
        return ids + lengths + sum(tensor.shape[0] for tensor in cache.values())


def caches(layers: int) -> dict[str, Tensor]:
    """The caches of K3.1 by name: two for each KDA layer, three for every fourth layer."""
    made: dict[str, Tensor] = {}
    for layer in range(layers):
        if layer % 4 == 3:
            made |= {f"cache.{layer}.{part}": torch.zeros(1, 64, 8) for part in ("latent", "rope", "index_key")}
        else:
            made |= {f"state.{layer}.conv": torch.zeros(1, 12, 3), f"state.{layer}.kda": torch.zeros(1, 4, 8, 8)}
    return made


def microseconds(call: Callable[[], Any], calls: int = 2000) -> float:
    """The median of nine means."""
    times: list[float] = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    args = (torch.ones(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int32), caches(options.layers))
    compiled = kimigraph.optimize(Touch(), args, CompileConfig(target="cpu:reference", cache="off", report=False))
    result = compiled(*args)
    call, _, _ = next(iter(compiled.known_calls))
    arguments = call.arguments(args, {})
    assert arguments is not None and torch.equal(compiled(*args), result)
    whole, alone = microseconds(lambda: compiled(*args)), microseconds(lambda: call.step(arguments))
    document = {
        "command": "PYTHONPATH=. python " + " ".join(sys.argv),
        "tensors": 2 + len(args[2]),
        "call_us": round(whole, 2),
        "program_us": round(alone, 2),
        "dispatch_us": round(whole - alone, 2),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    print(json.dumps(document, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
