"""What assign-streams, plan-memory and verify-schedule take of a compilation, at so many nodes.

    PYTHONPATH=. python bench/schedule_cost.py --nodes 5000 --out bench/results/schedule_cost.json

The model is a grid of products, eight chains of which each now and then takes from the one beside it, with streams
forced: all of its nodes reach the three passes. Seconds are of this process; no GPU is needed. One product more or less
a chain gives no kernel to build, which would only make the share smaller.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kimigraph.capture import capture_module
from kimigraph.codegen import build_artifact
from kimigraph.ir.config import CompileConfig
from kimigraph.passes import TimePasses, default_pipeline, run_pipeline
from kimigraph.session import pass_context

CHAINS, WIDTH = 8, 64
SCHEDULE = ("assign-streams", "plan-memory", "verify-schedule")


class Grid(torch.nn.Module):
    """Chains of products; every eighth step a chain multiplies with the one beside it."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.steps = nodes // CHAINS
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=False)

    def forward(self, *chains: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The ends of all chains."""
        for step in range(self.steps):
            beside = [*chains[1:], chains[0]]
            chains = tuple(
                one @ (other if step % 8 == 7 else self.weight) for one, other in zip(chains, beside, strict=True)
            )
        return chains


def measure(nodes: int) -> dict[str, Any]:
    """Seconds of each stage and pass."""
    config = CompileConfig(target="cuda:sm_90", force_streams=True)
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    program = capture_module(Grid(nodes), tuple(torch.randn(WIDTH, WIDTH) for _ in range(CHAINS)), {}, config)
    seconds["capture"] = time.perf_counter() - start
    clock, start = TimePasses(), time.perf_counter()
    run_pipeline(program, default_pipeline(config), pass_context(config), [clock])
    seconds["passes"] = time.perf_counter() - start
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        manifest = build_artifact(program, config.target, Path(directory), self_test=False)
    seconds["codegen"] = time.perf_counter() - start
    passes = dict(clock.seconds)
    total, ours = sum(seconds.values()), sum(passes[name] for name in SCHEDULE)
    return {
        "nodes": len(program.graph_module.graph.nodes),
        "streams": manifest.streams,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "schedule": {name: round(passes[name], 3) for name in SCHEDULE},
        "share": round(ours / total, 4),
    }


def main() -> None:
    """Measure and write one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    document = {
        "command": "PYTHONPATH=. python " + " ".join(sys.argv),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        **measure(options.nodes),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
