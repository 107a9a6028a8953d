"""One decode step of K3.1 at width on one stream, on streams where the cost model says they pay, and on forced streams.

    PYTHONPATH=. python bench/streams.py --layers 4 --batch 1 8 64 --context 32768 --out bench/results/streams.json

Microseconds per replay of the step's CUDA graph, median; the three programs take turns, so that they see one clock.
Also: nodes aside and events of each schedule, bytes that a step of the planned program takes from torch's allocator at
its peak beside what it returns, against the plan's arena and its lower bound, and whether all give the bits of one
stream (``halves``, two half-batches, multiplies other tiles). ``--programs DIR`` keeps the programs.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from run_facts import run_facts
from step_programs import FORMS, USUAL, StepPrograms, kept_in

from kimigraph.bench.protocol import time_in_graph
from kimigraph.ir.config import CompileConfig
from kimigraph.runtime.executor import Executor

TURNS = 5


def memory_facts(executor: Executor, tensors: list[torch.Tensor]) -> dict[str, int]:
    """What a step that is not the first allocates: calls, and bytes at the peak; its results are among both."""
    executor(*tensors)
    outputs = executor(*tensors)
    results = sum(output.untyped_storage().nbytes() for output in outputs)
    del outputs
    torch.cuda.synchronize()
    before, calls = torch.cuda.memory_allocated(), allocations()
    torch.cuda.reset_peak_memory_stats()
    outputs = executor(*tensors)
    return {
        "allocations": allocations() - calls,
        "results": len(outputs),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "result_bytes": results,
    }


def allocations() -> int:
    """How often memory was asked for so far."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@torch.no_grad()
def one(batch: int, kept: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one shape."""
    programs = StepPrograms(CompileConfig(batch=batch, context=options.context), options.layers, kept)
    given = programs.given
    record: dict[str, Any] = {"batch": batch, "context": options.context, "layers": options.layers}
    executors: dict[str, Executor] = {}
    first = [tensor.clone() for tensor in given]
    results: dict[str, list[torch.Tensor]] = {}
    for form in options.forms:
        program = programs.program(form)
        executors[form] = program.executor
        record[form] = {**program.facts, **memory_facts(program.executor, given)}
        for tensor, value in zip(given, first, strict=True):
            tensor.copy_(value)
        results[form] = [tensor.clone() for tensor in (*program.executor(*given), *given)]
        record[form]["same_bits"] = all(map(torch.equal, results[form], results["one"]))
        print(batch, form, record[form], flush=True)
    times: dict[str, list[float]] = {form: [] for form in options.forms}
    for _ in range(TURNS):
        for form, executor in executors.items():
            times[form].append(time_in_graph([partial(executor, *given)], at_least=1, replays=31).median)
    serial = statistics.median(times["one"])
    for form, found in times.items():
        record[form]["microseconds"] = round(statistics.median(found), 2)
        record[form]["gain"] = round(1 - statistics.median(found) / serial, 4)
        record[form]["turns"] = [round(time, 2) for time in found]
    print(batch, {form: record[form]["turns"] for form in options.forms}, flush=True)
    return record


def main() -> None:
    """Measure every batch size and write one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=USUAL, help="'one' among them, and first")
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.forms[0] != "one":
        parser.error(f"--forms {' '.join(options.forms)}: the others are held against one stream, put 'one' first")
    document: dict[str, Any] = {**run_facts(), "rows": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with kept_in(options.programs) as kept:
        for batch in options.batch:
            document["rows"].append(one(batch, kept, options))
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
