"""A decode step on two GPUs against one: time, communication that shows, the kernels of both, and that both agree.

    for n in 1 2; do kimigraph compile examples/k31 --batch 64 --context 131072 --dtype bfloat16 --target cuda \\
        --set num_hidden_layers=4 --tp $n --out programs/b64-tp$n; done
    PYTHONPATH=. torchrun --nproc-per-node 2 bench/tp_step.py --programs programs --names b64 --out tp2_k31.json

Weights and caches are random, drawn alike on both GPUs, and caches nearly full. Times are medians over replays of a
CUDA graph, of two ranks the longer. ``without_communication_us`` is the program with every collective left out (each
gives again what it gave once), and ``by_library_us`` that with each sum and gather by NCCL. Logits are compared with
those of one GPU. In bf16 picks near the bound flip: ``--compare`` programs in float32, over a context of no more than
the indexer's picks, have none that could.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from left_out import without_communication
from run_facts import run_facts
from torch.profiler import ProfilerActivity, profile

from kimigraph.bench.kernels import kernel_for
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.mesh import COLLECTIVES
from kimigraph.ir.program import InputSpec
from kimigraph.ir.ranks import ALL_RANKS, join, leave
from kimigraph.runtime.executor import Executor, load_program
from kimigraph.weights import drawn_weight

REPLAYS, IN_A_ROW, KERNELS = 41, 4, 24
Step = Callable[[], Any]


class Calls:
    """A step as it is, in place of a graph of it: a prompt takes long enough for the host to keep ahead."""

    def __init__(self, step: Step) -> None:
        self.replay = step


def replayed(executor: Executor, step: Step) -> torch.cuda.CUDAGraph | Calls:
    """A decode step as a graph, a prompt as calls."""
    return Calls(step) if executor.manifest.info["phase"] == "prefill" else graph_of(step)[0]


def graph_of(step: Step) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The step as a graph, and what keeps its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        result = step()
    return graph, result


def microseconds(graph: torch.cuda.CUDAGraph | Calls, together: bool, replays: int = REPLAYS) -> float:
    """Of one replay, median. Replays in a row spread the skew of the ranks' starts; the longer of the ranks counts."""
    replays, in_a_row = (21, 1) if isinstance(graph, Calls) else (replays, IN_A_ROW)
    times: list[float] = []
    for _ in range(replays + 2):
        if together:
            dist.barrier()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(in_a_row):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / in_a_row)
    found = torch.tensor([statistics.median(times[2:])], device="cuda")
    if together:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def kernels_of(graph: torch.cuda.CUDAGraph | Calls, together: bool) -> list[tuple[str, float, int]]:
    """Name, microseconds and number of the kernels of a replay that take longest."""
    replays = 1 if isinstance(graph, Calls) else 5
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        if together:  # a rank that starts later would be waited for
            dist.barrier()
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    rows = [
        (one.key[:70], round(one.self_device_time_total / replays, 1), one.count // replays)
        for one in run.key_averages()
    ]
    return sorted(rows, key=lambda row: -row[1])[:KERNELS]


def collectives() -> list[dict[str, Any]]:
    """Microseconds of collectives of some sizes, twenty in a graph: the library's, and those of programs."""
    library: Any = getattr(torch.ops, COLLECTIVES)
    rows: list[dict[str, Any]] = []
    how: dict[str, Any] = {"ways": dist.get_world_size(), "group": ALL_RANKS}

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        return library.wait_tensor(library.all_reduce(x, "sum", ALL_RANKS))

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        return library.wait_tensor(library.all_gather_into_tensor(x, how["ways"], ALL_RANKS))

    for shape in ((8, 2304), (64, 2304), (64, 3456), (8, 81920), (64, 81920)):
        x = torch.randn(shape, device="cuda").bfloat16()
        summed = kernel_for("rank_sum", {"addend": x}, how).launch
        gathered = kernel_for("rank_gather", {"part": x}, {"dim": 1, **how}).launch
        forms = {"all_reduce": all_reduce, "rank_sum": summed, "all_gather": all_gather, "rank_gather": gathered}
        row: dict[str, Any] = {"bytes": x.nbytes}
        for name, one in forms.items():
            graph, _ = graph_of(lambda one=one, x=x: [one(x) for _ in range(20)][-1])
            row[name] = round(microseconds(graph, True, 11) / 20, 2)
        whole = torch.cat(all_gather(x).chunk(how["ways"]), 1)
        row["equal"] = torch.equal(all_reduce(x), summed(x)) and torch.equal(whole, gathered(x))
        rows.append(row)
    return rows


def bound(directory: Path, rank: int, nudged: bool = False) -> Executor:
    """The program over random weights, of which the rank has its parts; ``nudged``: last bits of embeddings differ."""
    manifest = Manifest.read(directory)
    device = torch.device("cuda", torch.cuda.current_device())
    weights = {s.source: drawn_weight(s, 0, device, rank) for s in manifest.bound if s.kind == "weight"}
    if nudged:
        bits = weights["model.embed_tokens.weight"].view(torch.int16)
        bits.bitwise_xor_(torch.randint_like(bits, 2))
    return Executor(directory, weights, give_up=True)


def arguments(executor: Executor, rank: int) -> list[torch.Tensor]:
    """The caller's tensors, the same for one GPU and for two: caches with room for two more tokens; of a prompt new."""
    info = executor.manifest.info
    length = 0 if info["phase"] == "prefill" else int(info["context"]) - 2
    return [_argument(spec, length, rank, executor.device) for spec in executor.caller_inputs]


def _argument(spec: InputSpec, length: int, rank: int, device: torch.device) -> torch.Tensor:
    random = torch.Generator(device).manual_seed(sum(map(ord, spec.source)))
    dtype = getattr(torch, spec.dtype)
    if spec.source == "lengths":
        return torch.full(spec.shape, length, dtype=dtype, device=device)
    if spec.value_range is not None:
        return torch.randint(0, spec.value_range[1], spec.shape, generator=random, device=device, dtype=dtype)
    whole = torch.empty(spec.whole_shape, dtype=dtype, device=device)
    whole.normal_(0, 0.1 if spec.source.endswith("kda") else 1.0, generator=random)
    return whole if spec.shared is None else spec.taken(whole, rank)


def changed(directory: Path) -> Callable[..., Any]:
    """The step of the program with all collectives by NCCL."""
    program: Any = load_program(directory)
    for name, launch in vars(program.kernels).items():
        if name.startswith(("rank_sum", "rank_gather")):
            vars(program.kernels)[name] = by_library(launch)
    return program.step


def by_library(launch: Callable[..., Any]) -> Callable[..., Any]:
    """The launch of a program of its own, whose ranks do not meet."""
    launch.__globals__["meeting_place"] = lambda *_: None
    return launch


def one_gpu(directory: Path, timed: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits of the program for one GPU, and its figures."""
    executor = bound(directory, 0)
    given = arguments(executor, 0)
    logits, row = executor(*given)[0].float().clone(), dict[str, Any]()
    if timed:
        graph = replayed(executor, partial(executor, *given))
        row |= {"one_gpu_us": microseconds(graph, False), "one_gpu_kernels": kernels_of(graph, False)}
        del graph, executor, given
        torch.cuda.empty_cache()
        executor = bound(directory, 0, nudged=True)
        row["nudged"] = difference(executor(*arguments(executor, 0))[0].float(), logits)
    return logits, row


def difference(logits: torch.Tensor, wanted: torch.Tensor) -> dict[str, float]:
    """How far logits are off, relative to the largest, and in how many rows the largest is the same."""
    errors = (logits - wanted).abs().amax(-1).flatten() / wanted.abs().max()
    same = (logits.argmax(-1) == wanted.argmax(-1)).float().mean()
    return {"relative_error": float(errors.max()), "median_row": float(errors.median()), "same_argmax": float(same)}


def two_gpus(directory: Path, rank: int, timed: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits of the program for two GPUs on this rank, and its figures."""
    executor = bound(directory, rank)
    given = arguments(executor, rank)
    logits = executor(*given)[0].float().clone()
    both = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(both, logits)
    row: dict[str, Any] = {"ranks_agree": all(torch.equal(one, both[0]) for one in both)}
    own = executor.step
    for name in ("two_gpus_us", "by_library_us", "without_communication_us") if timed else ():
        executor.step = changed(directory) if name == "by_library_us" else own
        step = partial(executor, *given)
        if name == "without_communication_us":
            step = without_communication(executor, directory, given)
        graph = replayed(executor, step)
        row[name] = microseconds(graph, True)
        if name != "by_library_us":
            row[name.replace("_us", "_kernels")] = kernels_of(graph, True)
    return logits, row


def compared(name: str, programs: Path, form: str, rank: int, timed: bool) -> dict[str, Any]:
    """All figures of the two programs of that name; those of rank 0 count."""
    manifest = Manifest.read(programs / f"{name}-{form}")
    shape = {key: manifest.info[key] for key in ("batch", "context")}
    row: dict[str, Any] = {"program": f"{name}-{form}", **shape}
    wanted = None
    if rank == 0:
        wanted, facts = one_gpu(programs / f"{name}-tp1", timed)
        row |= facts
        torch.cuda.empty_cache()
    dist.barrier()
    logits, facts = two_gpus(programs / f"{name}-{form}", rank, timed)
    row |= facts
    torch.cuda.empty_cache()
    if wanted is not None:
        row |= difference(logits, wanted)
    if rank == 0 and timed:
        row["speed_up"] = row["one_gpu_us"] / row["two_gpus_us"]
        row["exposed_share"] = 1 - row["without_communication_us"] / row["two_gpus_us"]
    return row


def main() -> None:
    """Measure every pair of programs and write one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=Path, required=True, help="directory with NAME-tp1 and NAME-FORM")
    parser.add_argument("--form", choices=["tp2", "sp2"], default="tp2", help="what the two ranks share out")
    parser.add_argument("--names", nargs="+", required=True, help="pairs that are timed and compared")
    parser.add_argument("--compare", nargs="*", default=[], help="pairs that are compared alone")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rank = join({options.form[:2]: 2}, "cuda")
    document: dict[str, Any] = {**run_facts(), "collectives_us": collectives(), "rows": []}
    for name in (*options.compare, *options.names):
        row = compared(name, options.programs, options.form, rank, name in options.names)
        document["rows"].append(row)
        if rank == 0:
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            print(json.dumps({key: value for key, value in row.items() if not key.endswith("kernels")}), flush=True)
    leave()


if __name__ == "__main__":
    main()
