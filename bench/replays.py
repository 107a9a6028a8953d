"""Replays of CUDA graphs of several streams, with random delays between what the streams run: the bits must not change.

    PYTHONPATH=. python bench/replays.py --layers 4 --replays 10000 --out bench/results/replays.json

Programs: K3.1 at width and a wide one by hand (``kimigraph.bench.branches``), in planned arenas, on as many streams as
is legal. Each replay has delays of its own; beside it the same program on one stream, without delays, gets the same
inputs. Outputs are compared after each replay, caches and states after every hundredth, where they begin anew.
``--seconds`` ends a program's replays behind a hundredth once they took so long; ``--programs DIR`` keeps the programs
of K3.1.
"""

import argparse
import json
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from run_facts import run_facts
from step_programs import StepPrograms, kept_in

from kimigraph.bench.branches import branches
from kimigraph.bench.delays import Delays
from kimigraph.codegen import build_artifact
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import InputSpec
from kimigraph.runtime.executor import Executor
from kimigraph.runtime.graphs import graph_mode

ANEW = 100


class Side:
    """One program in graph mode with caches of its own."""

    def __init__(self, executor: Executor, tensors: list[torch.Tensor]) -> None:
        self.executor, self.mode = executor, graph_mode("cuda", reuse_outputs=True)
        self.mode.adopt(executor)
        self.first = tensors
        self.tensors = [tensor.clone() for tensor in tensors]

    def capture(self) -> None:
        """Capture the step; nothing changes."""
        self.mode.capture(self.executor, self.tensors)

    def begin_anew(self) -> None:
        """All tensors as at first."""
        for tensor, first in zip(self.tensors, self.first, strict=True):
            tensor.copy_(first)

    def step(self) -> tuple[torch.Tensor, ...]:
        """One replay."""
        return self.executor(*self.tensors)


def differences(ours: Any, theirs: Any) -> torch.Tensor:
    """How many tensors differ in a bit, on the device."""
    return torch.stack([(bits(a) != bits(b)).any() for a, b in zip(ours, theirs, strict=True)]).sum()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that a NaN equals itself."""
    return tensor.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


@torch.no_grad()
def compare(
    name: str, many: Executor, one: Executor, tensors: list[torch.Tensor], options: argparse.Namespace
) -> dict[str, Any]:
    """Replay both programs and count what differs."""
    delays = Delays(many)
    ours, theirs = Side(many, tensors), Side(one, tensors)
    ours.capture()
    theirs.capture()
    changing = [place for place, spec in enumerate(many.caller_inputs) if changes(spec)]
    found = torch.zeros((), dtype=torch.int64, device="cuda")
    start, done = time.perf_counter(), 0
    for number in range(options.replays):
        delays.draw()
        if number % ANEW == 0:
            ours.begin_anew()
            theirs.begin_anew()
        for place in changing:
            draw_input(ours.tensors[place], many.caller_inputs[place])
            theirs.tensors[place].copy_(ours.tensors[place])
        found += differences(ours.step(), theirs.step())
        done = number + 1
        if done % ANEW == 0:
            found += differences(ours.tensors, theirs.tensors)
            torch.cuda.synchronize()
            if time.perf_counter() - start > options.seconds:
                break
    finite = all(bool(item.isfinite().all()) for item in ours.step() if item.is_floating_point())
    record = {
        "program": name,
        "replays": done,
        "target": many.manifest.target,
        "streams": many.manifest.streams,
        "delays": delays.count,
        "longest_delay_us": delays.longest / 1000,
        "different": int(found),
        "finite": finite,
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(record), flush=True)
    return record


def changes(spec: InputSpec) -> bool:
    """Whether a replay gets a new value of the input: token ids and activations, not lengths."""
    return spec.kind == "input" and (spec.dtype == "int64" or spec.dtype.startswith(("float", "bfloat")))


def draw_input(tensor: torch.Tensor, spec: InputSpec) -> None:
    """Another value."""
    if tensor.is_floating_point():
        tensor.normal_()
    else:
        tensor.random_(0, 1000)


def wide(streams: int, scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The wide program on so many streams."""

    def built(count: int) -> Executor:
        directory = scratch / f"wide-{streams}-{count}"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        build_artifact(branches(count), "cuda", directory, self_test=False)
        return Executor(directory, {})

    many = built(streams)
    tensors = [torch.zeros(spec.shape, device="cuda") for spec in many.caller_inputs]
    return compare(f"wide, {streams} streams", many, built(1), tensors, options)


def k31(kept: Path, options: argparse.Namespace) -> dict[str, Any]:
    """K3.1 at width with streams forced."""
    shape = CompileConfig(batch=options.batch, context=options.context)
    programs = StepPrograms(shape, options.layers, kept)
    many, one = (programs.program(form).executor for form in ("forced", "one"))
    name = f"K3.1, {options.layers} layers, B{options.batch}, {options.context} positions"
    return compare(name, many, one, programs.given, options)


def main() -> None:
    """Run all programs and write one JSON document; exit status 1 where a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4, help="of K3.1; 0 leaves it out")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of one program's replays")
    parser.add_argument("--wide", type=int, nargs="*", default=[2, 3], help="streams of the wide programs")
    parser.add_argument("--programs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    document: dict[str, Any] = {**run_facts(), "rows": []}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with kept_in(options.programs) as kept:
        runs = [partial(wide, streams, kept, options) for streams in options.wide]
        if options.layers:
            runs.append(partial(k31, kept, options))
        for run in runs:
            document["rows"].append(run())
            options.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(any(row["different"] or not row["finite"] for row in document["rows"]))


if __name__ == "__main__":
    main()
