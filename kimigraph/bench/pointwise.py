"""``kimigraph bench pointwise``: generated kernels against eager and torch.compile, on chains of models."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
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
    for chain in CHAINS:
        for count in tokens if not chosen or chain.name in chosen else ():
            document["points"].append(point(chain, count))
            say(line(document["points"][-1]))
    return document


def point(chain: Chain, tokens: int) -> dict[str, Any]:
    """One chain at one number of tokens: inputs that are not in the cache, all three in CUDA graphs that take turns."""
    given = [chain.operands(tokens) for _ in range(sets_for_cold_cache(chain.bytes(tokens)))]
    step, launches = compiled_step(chain, given[0])
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


def compiled_step(chain: Chain, operands: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], int]:
    """The compiled chain as a function of its operands, and how many kernels it launches."""
    config = CompileConfig(target="cuda")
    program = capture_module(chain.module(), tuple(operands), {}, config)
    run_pipeline(program, Pipeline.parse(PIPELINE), PassContext(config), [])
    directory = Path(tempfile.mkdtemp(prefix="kimigraph-bench-"))
    manifest = build_artifact(program, "cuda", directory, self_test=False)
    executor = Executor(directory, {s.source: program.tensors[s.name] for s in program.inputs if s.bound})
    return executor, manifest.launches


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
