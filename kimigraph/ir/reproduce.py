"""What a reproducer does when it runs: two forms of one program on seeded data, and whether they agree."""

import argparse
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kimigraph.ir.accuracy import TOLERANCE_FP32, Deviation, deviation
from kimigraph.ir.data_sets import DataSet, make_data, run_steps
from kimigraph.ir.program import InputSpec

Step = Callable[..., Sequence[Any]]


def main(
    before: Step,
    after: Step,
    without: Step,
    inputs: Sequence[InputSpec],
    outputs: Sequence[str],
    constants: Mapping[str, torch.Tensor],
    data: DataSet,
    tolerances: Mapping[str, float],
    arguments: Sequence[str] | None = None,
) -> None:
    """Compare ``after`` (or ``without``, when asked) with ``before`` and exit 1 when they differ, 0 when not."""
    parser = argparse.ArgumentParser(description="exit 1 when the failure shows, 0 when it does not")
    parser.add_argument("--without-rewrite", action="store_true", help="run the graph without the wrong rewrite")
    parser.add_argument("--diff", action="store_true", help="print what the pass changed, and run nothing")
    options = parser.parse_args(arguments)
    if options.diff:
        print(_difference(before, after))
        return
    form = without if options.without_rewrite else after
    worst = apart(before, form, inputs, outputs, constants, data, tolerances)
    print("same result:" if worst.passed else "FAILS:", worst)
    raise SystemExit(0 if worst.passed else 1)


def apart(
    before: Step,
    form: Step,
    inputs: Sequence[InputSpec],
    outputs: Sequence[str],
    constants: Mapping[str, torch.Tensor],
    data: DataSet,
    tolerances: Mapping[str, float],
) -> Deviation:
    """How far two forms of a program are apart, each run with its own picks."""
    tensors = make_data(data, inputs, constants)
    want = run_steps(before, data, inputs, tensors, outputs)
    got = run_steps(form, data, inputs, tensors, outputs)
    return deviation(got, want, TOLERANCE_FP32, tolerances)


def _difference(before: Step, after: Step) -> str:
    old, new = (inspect.getsource(inspect.unwrap(step)).splitlines() for step in (before, after))
    return "\n".join(difflib.unified_diff(old, new, "before", "after", lineterm=""))
