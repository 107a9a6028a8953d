"""One decode step of Kimi K3.1 at width on a GPU: correctness in bf16, then time against eager and torch.compile.

    PYTHONPATH=. python bench/k31_decode.py --layers 4 --batch 1 8 --context 32768 --out bench/results/k31_decode.json

Times are medians over replays with the caches nearly full: ``host`` per call as a user sees it, ``graph`` the same step
captured as one CUDA graph (device time without launch overhead). Launches are the nodes of that graph, by kind.
``--level`` takes another optimization level, ``--only`` some of the steps (``--only kimigraph`` needs no peer), and
``--trace`` lists what one replay ran, with microseconds.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from run_facts import run_facts

from kimigraph.bench.graph_nodes import graph_nodes
from kimigraph.bench.graph_trace import graph_trace
from kimigraph.bench.protocol import time_in_graph
from kimigraph.capture import capture_module
from kimigraph.capture.program import tensors_of
from kimigraph.codegen import build_artifact
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram
from kimigraph.models.kimi_k31 import KimiK31Config, KimiK31ForCausalLM, new_cache
from kimigraph.passes import default_pipeline, fusion_summary, run_pipeline
from kimigraph.runtime.executor import Executor
from kimigraph.selections import with_selections
from kimigraph.session import pass_context
from kimigraph.verify import EAGER_FACTOR, run_artifact, run_graph

UNMERGED = ("merge-horizontal", "fuse-pointwise", "merge-regions")
"""Without these passes a program has a kernel for every operator that the others leave."""

STEPS = ("kimigraph", "unmerged", "eager", "torch.compile")

CONFIG = Path(__file__).parent.parent / "examples" / "k31" / "config.json"


def random_model(layers: int, dtype: torch.dtype) -> KimiK31ForCausalLM:
    """K3.1 at width with random weights drawn on the GPU: N(0, 1/fan_in), norms 1 + 0.1 N, A_log U[0, 1]."""
    config = KimiK31Config.from_file(CONFIG, [("num_hidden_layers", str(layers)), ("dtype", str(dtype)[6:])])
    model = KimiK31ForCausalLM(config, device="cuda")
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_()
        elif parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        else:
            parameter.normal_(std=0.1).add_(1.0 if "norm" in name and not name.endswith("bias") else 0.0)
    return model


def example(model: KimiK31ForCausalLM, batch: int, context: int) -> tuple[Any, ...]:
    """Arguments of one step with ``context - 2`` cached tokens; caches and states N(0, 1)."""
    torch.manual_seed(1)
    cache = new_cache(model.config, batch, context, model.config.torch_dtype, "cuda")
    for name, tensor in cache.items():
        tensor.normal_(std=0.1 if name.endswith("kda") else 1.0)
    ids = torch.randint(0, model.config.vocab_size, (batch, 1), device="cuda")
    return ids, torch.full((batch,), context - 2, dtype=torch.int32, device="cuda"), cache


def host_time(step: Callable[[], Any], calls: int = 30) -> float:
    """Microseconds per call, median of five runs of ``calls`` calls."""
    for _ in range(3):
        step()
    times: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


def graph_time(step: Callable[[], Any]) -> float | str:
    """Microseconds per replay of ``step`` captured as a CUDA graph, median; the reason where it cannot be captured."""
    return captured_facts(lambda one: time_in_graph([one], at_least=1, replays=21).median, step)


def widened(
    model: KimiK31ForCausalLM, captured: CapturedProgram, args: tuple[Any, ...], layers: int
) -> CapturedProgram:
    """The same graph in fp32 over the same rounded weights."""
    wide_model = random_model(layers, torch.float32)
    with torch.no_grad():
        for name, parameter in wide_model.named_parameters():
            parameter.copy_(model.get_parameter(name))
    ids, lengths, cache = args
    wide_args = (ids, lengths, {name: tensor.float() for name, tensor in cache.items()})
    return capture_module(wide_model, wide_args, {}, CompileConfig(target="cuda"))


def check(
    captured: CapturedProgram, wide: CapturedProgram, directory: Path, picks: dict[str, torch.Tensor], args: Any
) -> dict[str, Any]:
    """Relative errors against fp32 with the same picks: 16-bit eager and the program, for every output and cache."""
    tensors = tensors_of(captured, args, {})
    given = {spec.source: t for spec, t in zip(captured.inputs, tensors, strict=True)}
    wide_tensors = [
        wide.tensors[s.name] if s.bound else given[s.source].to(getattr(torch, s.dtype)) for s in wide.inputs
    ]
    eager, selections = run_graph(captured, tensors)
    eager_error = eager.error_against(run_graph(wide, wide_tensors, selections.picked)[0])
    program = run_artifact(directory, captured, tensors, torch.device("cuda"))
    program_error = program.error_against(run_graph(wide, wide_tensors, picks)[0])
    rows = {name: {"eager": eager_error[name][1], "program": program_error[name][1]} for name in program_error}
    passed = all(row["program"] <= max(EAGER_FACTOR * row["eager"], 1e-6) for row in rows.values())
    return {"relative_error": rows, "factor": EAGER_FACTOR, "passed": passed}


def program_of(
    captured: CapturedProgram, config: CompileConfig, directory: Path
) -> tuple[Executor, CapturedProgram, dict[str, Any]]:
    """The compiled step, the graph that it was built of, and facts about it."""
    program, device_config = captured.copy(), replace(config, target="cuda")
    records = run_pipeline(program, default_pipeline(device_config), pass_context(device_config), [])
    directory.mkdir()
    manifest = build_artifact(program, "cuda", directory, self_test=False)
    executor = Executor(directory, {s.source: captured.tensors[s.name] for s in captured.inputs if s.bound})
    fusions = {entry["rule"]: entry["count"] for entry in fusion_summary(records)}
    return executor, program, {"fusions": fusions, "launches": manifest.launches}


def captured_facts(facts: Callable[[Callable[[], Any]], Any], step: Callable[[], Any]) -> Any:
    """What ``facts`` says of the step's CUDA graph; the reason where it cannot be captured."""
    try:
        return facts(step)
    except Exception as error:
        return f"not capturable: {type(error).__name__}: {str(error)[:200]}"


def one(batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one shape."""
    torch.compiler.reset()
    context, layers = options.context, options.layers
    config = CompileConfig(target="cuda", batch=batch, context=context, opt_level=options.level)
    model = random_model(layers, torch.bfloat16)
    args = example(model, batch, context)
    record: dict[str, Any] = {"batch": batch, "context": context, "layers": layers, "level": options.level}
    start = time.perf_counter()
    captured = capture_module(model, args, {}, config)
    record["capture_seconds"] = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as scratch:
        directory, picked = Path(scratch) / "program", Path(scratch) / "picks"
        picked.mkdir()
        executor, program, facts = program_of(captured, config, directory)
        record |= facts
        flat = [t for s, t in zip(captured.inputs, tensors_of(captured, args, {}), strict=True) if not s.bound]
        if options.check:
            extended, names = with_selections(program)
            build_artifact(extended, "cuda", picked, self_test=False)
            values = run_artifact(picked, extended, tensors_of(captured, args, {}), torch.device("cuda")).values
            picks = {name: values[f"picks.{name}"] for name in names}
            record["correct"] = check(captured, widened(model, captured, args, layers), directory, picks, args)
            torch.cuda.empty_cache()
        steps: dict[str, Callable[[], Any]] = {"kimigraph": lambda: executor(*flat)}
        if "unmerged" in options.only:
            plain = replace(config, disabled_passes=UNMERGED)
            unmerged, _, record["unmerged"] = program_of(captured, plain, Path(scratch) / "unmerged")
            steps["kimigraph, unmerged"] = lambda: unmerged(*flat)
        if "eager" in options.only:
            steps["eager"] = lambda: model(*args)
        if "torch.compile" in options.only:
            compiled = torch.compile(model, dynamic=False)
            steps["torch.compile"] = lambda: compiled(*args)
        with torch.no_grad():
            record["microseconds"] = {
                name: {"host": host_time(step), "graph": graph_time(step)} for name, step in steps.items()
            }
            record["graph_nodes"] = {name: captured_facts(graph_nodes, step) for name, step in steps.items()}
            if options.trace and batch == options.batch[-1]:  # a profiler slows what is timed after it
                record["trace"] = captured_facts(graph_trace, steps["kimigraph"])
    return record


def main() -> None:
    """Measure every batch size and write one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--level", type=int, choices=range(4), default=CompileConfig().opt_level)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS, help="what is timed")
    parser.add_argument("--trace", action="store_true", help="profile one replay at the last batch size")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = [one(batch, options) for batch in options.batch]
    document = {**run_facts(), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if key not in ("correct", "trace")}))
        print("correct", row.get("correct", {}).get("passed"))


if __name__ == "__main__":
    main()
