"""What a product in parts of its rows costs beyond the whole: for ``overlap-communication``, which sums parts in turn.

PYTHONPATH=. python bench/product_parts.py --out bench/results/product_parts.json
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run_facts import run_facts

ROWS = (2048, 4096, 8192, 16384)
WIDTHS = ((2048, 2304), (4608, 2304), (6144, 7168))
REPEATS = 30


def microseconds(work: Callable[[], Any]) -> float:
    """The quickest of five replays of a graph of thirty runs, for one."""
    for _ in range(5):
        work()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best * 1e3 / REPEATS


def measured(rows: int, inner: int, outer: int) -> dict[str, Any]:
    """One product in bf16: whole, in 2 and in 4 parts, and the parts' joining."""
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16)

    def parts(count: int) -> list[torch.Tensor]:
        return [torch.nn.functional.linear(part, weight) for part in x.chunk(count)]

    made = parts(2)
    return {
        "rows": rows,
        "inner": inner,
        "outer": outer,
        "whole_us": round(microseconds(lambda: parts(1)), 1),
        "two_us": round(microseconds(lambda: parts(2)), 1),
        "four_us": round(microseconds(lambda: parts(4)), 1),
        "join_us": round(microseconds(lambda: torch.cat(made)), 1),
    }


def main() -> None:
    """Measure all shapes and write them down."""
    parser = argparse.ArgumentParser(description="time products in parts of their rows")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [measured(count, *widths) for count in ROWS for widths in WIDTHS]
    document = {**run_facts(), "rows": rows}
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
