"""One decode step of K3.1 at width on one stream, on streams where the cost model says they pay, and on forced streams.

    PYTHONPATH=. python bench/streams.py --layers 4 --batch 1 8 64 --context 32768 --out bench/results/streams.json

Microseconds per replay of the step's CUDA graph, median; the three programs take turns, so that they see one clock.
Also: nodes aside and events of each schedule, bytes that a step of the planned program takes from torch's allocator at
its peak beside what it returns, against the plan's arena and its lower bound, and whether all three give the same bits.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from k31_decode import example, program_of, random_model
from run_facts import run_facts

from kimigraph.bench.protocol import time_in_graph
from kimigraph.capture import capture_module
from kimigraph.capture.program import tensors_of
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.lifetimes import Lifetimes
from kimigraph.ir.memory_plan import aligned, arena_bytes
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.schedule import stream_of, waits_of
from kimigraph.runtime.executor import Executor

TURNS = 5


def schedule_facts(program: CapturedProgram) -> dict[str, Any]:
    """Streams, nodes aside, events and the arena of a compiled graph."""
    graph = program.graph_module.graph
    lifetimes = Lifetimes(graph)
    return {
        "streams": 1 + max(stream_of(node) for node in graph.nodes),
        "aside": sum(stream_of(node) > 0 for node in graph.nodes),
        "events": len({name for node in graph.nodes for name in waits_of(node)}),
        "arena_bytes": arena_bytes(graph),
        "lower_bound": lifetimes.lower_bound([aligned(tensor.nbytes) for tensor in lifetimes.tensors]),
    }


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
def one(batch: int, context: int, layers: int) -> dict[str, Any]:
    """All figures of one shape."""
    model = random_model(layers, torch.bfloat16)
    args = example(model, batch, context)
    config = CompileConfig(target="cuda", batch=batch, context=context)
    captured = capture_module(model, args, {}, config)
    forms = {"one": replace(config, streams=1), "paying": config, "forced": replace(config, force_streams=True)}
    record: dict[str, Any] = {"batch": batch, "context": context, "layers": layers}
    executors: dict[str, Executor] = {}
    given = [t for s, t in zip(captured.inputs, tensors_of(captured, args, {}), strict=True) if not s.bound]
    kept = [tensor.clone() for tensor in given]
    results: dict[str, list[torch.Tensor]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, form in forms.items():
            executors[name], program, _ = program_of(captured, form, Path(scratch) / name)
            record[name] = schedule_facts(program)
            record[name] |= memory_facts(executors[name], given)
            for tensor, first in zip(given, kept, strict=True):
                tensor.copy_(first)
            outputs = executors[name](*given)
            results[name] = [tensor.clone() for tensor in (*outputs, *given)]
            print(batch, name, record[name], flush=True)
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(TURNS):
            for name, executor in executors.items():
                times[name].append(time_in_graph([partial(executor, *given)], at_least=1, replays=31).median)
    for name in forms:
        record[name]["microseconds"] = round(statistics.median(times[name]), 2)
        record[name]["turns"] = [round(time, 2) for time in times[name]]
        record[name]["same_bits"] = all(map(torch.equal, results[name], results["one"]))
    print(batch, {name: record[name]["turns"] for name in forms}, flush=True)
    return record


def main() -> None:
    """Measure every batch size and write one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    document: dict[str, Any] = {
        **run_facts(),
        "rows": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for batch in options.batch:
        document["rows"].append(one(batch, options.context, options.layers))
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
