"""``kimigraph bench pointwise``: generated kernels against eager and torch.compile, on chains of models."""

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import starmap
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kimigraph.bench.kda import machine
from kimigraph.bench.pointwise_chains import CHAINS, Chain
from kimigraph.bench.protocol import relative_error, require_gpu, sets_for_cold_cache, times_in_turn
from kimigraph.capture import capture_module
from kimigraph.codegen import build_artifact
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import NumericsError
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.runtime.executor import Executor

TOKENS = (1, 64, 512, 4096)
PIPELINE = "canonicalize,fuse-pointwise"
TOLERANCE = {torch.bfloat16: 4e-3, torch.float32: 1e-5}
"""Of the norm of the difference from eager over the norm: a rounding of bf16 that fell the other way now and then."""


def run(chosen: Sequence[str], say: Callable[[str], None], tokens: Sequence[int] = TOKENS) -> dict[str, Any]:
    """All chains, or those chosen by name. The document for ``--json``.

    Raises UsageError without a GPU and NumericsError where a kernel's result differs from eager's.
    """
    require_gpu()
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": machine(), "points": []}
    points = [(chain, count) for chain in CHAINS if not chosen or chain.name in chosen for count in tokens]
    with tempfile.TemporaryDirectory(prefix="kimigraph-bench-") as scratch:
        kept = [Path(scratch) / f"{chain.name}-{count}" for chain, count in points]
        for (chain, count), artifact, launches in zip(points, kept, built(points, kept), strict=True):
            document["points"].append(point(chain, count, Executor(artifact, {}), launches))
            say(line(document["points"][-1]))
    return document


def built(points: Sequence[tuple[Chain, int]], artifacts: Sequence[Path]) -> list[int]:
    """Compile chains in processes side by side, which end before anything is timed; launches of each."""
    jobs = [(chain.name, count, artifact) for (chain, count), artifact in zip(points, artifacts, strict=True)]
    if len(jobs) == 1:
        return list(starmap(build, jobs))
    with ProcessPoolExecutor(min(8, len(jobs), os.cpu_count() or 1), get_context("spawn")) as pool:
        return list(pool.map(build, *zip(*jobs, strict=True)))


def build(name: str, tokens: int, artifact: Path) -> int:
    """Compile the chain of this name into a directory; how many kernels it launches."""
    chain = next(chain for chain in CHAINS if chain.name == name)
    program = capture_module(chain.module(), tuple(chain.operands(tokens)), {}, CompileConfig(target="cuda"))
    run_pipeline(program, Pipeline.parse(PIPELINE), PassContext(CompileConfig(target="cuda")), [])
    artifact.mkdir()
    return build_artifact(program, "cuda", artifact, self_test=False).launches


def point(chain: Chain, tokens: int, step: Callable[..., Any], launches: int) -> dict[str, Any]:
    """One chain at one number of tokens: inputs that are not in the cache, all three in CUDA graphs that take turns."""
    given = [chain.operands(tokens) for _ in range(sets_for_cold_cache(chain.bytes(tokens)))]
    error = _checked(chain, tokens, step(*given[0]), chain.function(*given[0]))
    rivals = (("ours", step), ("eager", chain.function), ("torch.compile", compiled_peer(chain)))
    times = times_in_turn({name: [partial(call, *one) for one in given] for name, call in rivals})
    return {
        "chain": chain.name,
        "tokens": tokens,
        "launches": launches,
        "error": float(f"{error:.3g}"),
        "us": {name: time.as_dict() for name, time in times.items()},
        "against_eager": round(times["eager"].median / times["ours"].median, 3),
        "against_torch_compile": round(times["torch.compile"].median / times["ours"].median, 3),
    }


def compiled_peer(chain: Chain) -> Callable[..., Any]:
    """torch.compile's function. It chooses its tiles here and now: a choice that another process made while it shared
    the device is not taken over."""
    return torch.compile(chain.function, dynamic=False, options={"autotune_local_cache": False})


def line(record: dict[str, Any]) -> str:
    """A point for people."""
    times = {name: time["median"] for name, time in record["us"].items()}
    return (
        f"{record['chain']:15} {record['tokens']:5} tokens  {times['ours']:8.2f} us  eager {times['eager']:8.2f} "
        f"({record['against_eager']:.2f}x)  torch.compile {times['torch.compile']:8.2f} "
        f"({record['against_torch_compile']:.2f}x)  {record['launches']} launches"
    )


def _checked(chain: Chain, tokens: int, found: Any, wanted: Any) -> float:
    pairs = zip(_tensors(found), _tensors(wanted), strict=True)
    worst = 0.0
    for ours, eager in pairs:
        error = relative_error(ours, eager)
        if ours.dtype is not eager.dtype or not error <= TOLERANCE[eager.dtype]:
            raise NumericsError(
                f"{chain.name}, {tokens} tokens: {error:.2g} from eager, {ours.dtype} for {eager.dtype}"
            )
        worst = max(worst, error)
    return worst


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)
