"""A published configuration at its full size on one GPU, random weights made there: compiled, generating, measured.

    PYTHONPATH=. python bench/whole_model.py examples/kimi_linear_48b --out bench/results/kimi_linear_48b.json

Says what each program took to compile and bind, what memory there is at the peak, how long prompts and new tokens take
alone and together, what a step takes (as calls, and replayed as a CUDA graph), whose kernels its time goes to, and how
far logits are from those of the model run as it is on the same weights. ``--compile B T`` only compiles the step of B
sequences by T tokens into the compile cache, so that several processes may.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from k31_decode import captured_facts
from run_facts import run_facts
from torch import nn

from kimigraph.bench.protocol import time_in_graph
from kimigraph.bench.step_share import step_share
from kimigraph.capture import load_source
from kimigraph.cli.shapes import parse_overrides
from kimigraph.compiler import compile_model
from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.generation import BoundStep, Sampling
from kimigraph.sequence_caches import cache_rows
from kimigraph.step_programs import StepPrograms

PROMPTS = (577, 130, 64, 5)
LENGTH = 600
GIGA = 1e9


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Wall time of a call, the device being idle before and after it; and what it returned."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def repeat(call: Callable[[], Any], count: int) -> None:
    """Several calls."""
    for _ in range(count):
        call()


def compiled(options: argparse.Namespace, config: CompileConfig) -> None:
    """Put one program into the compile cache."""
    batch, tokens = options.compile
    programs = StepPrograms(str(options.model), config, print, lambda *_: None)
    out, shaped = programs.artifact(batch, tokens), programs.shaped(batch, tokens)
    report = compile_model(str(options.model), programs.model(batch, tokens), shaped, out, lambda _: None)
    found = {entry["rule"]: entry["count"] for entry in report.fusions if entry["count"]}
    print(json.dumps({"batch": batch, "tokens": tokens, **report.timing, **report.launches, "fusions": found}))


def bound(generator: Generator) -> list[dict[str, Any]]:
    """Compile, or fetch, and bind each program."""
    rows: list[dict[str, Any]] = []
    programs = generator.programs
    for batch, tokens in shapes(generator):
        took, _ = seconds(partial(step_of, generator, batch, tokens))
        report = programs.reports[(batch, tokens)]
        row = {"batch": batch, "tokens": tokens, "seconds": took, "cache": report.cache["status"]}
        row |= {"timing": report.timing, "launches": report.launches}
        row |= {"fusions": {entry["rule"]: entry["count"] for entry in report.fusions if entry["count"]}}
        rows.append(row | memory())
        show(rows[-1])
    return rows


def shapes(generator: Generator) -> list[tuple[int, int]]:
    """The (batch, tokens) of all programs."""
    return [(batch, 1) for batch in generator.engine.batches] + [(1, size) for size in generator.engine.chunks[:-1]]


def memory() -> dict[str, float]:
    """Gigabytes on the device: now, at the most so far, and what the allocator holds."""
    return {
        "allocated_gb": torch.cuda.memory_allocated() / GIGA,
        "peak_gb": torch.cuda.max_memory_allocated() / GIGA,
        "reserved_gb": torch.cuda.max_memory_reserved() / GIGA,
    }


def generation(generator: Generator, new: int) -> dict[str, Any]:
    """Prompts alone and all together: times, and from where on greedy tokens differ."""
    drawn = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, generator.vocabulary, (size,), generator=drawn).tolist() for size in PROMPTS]
    sampling = Sampling(max_new_tokens=new, stop_ids=())
    generator.generate(prompts[-1:], sampling)  # warms up
    alone: list[dict[str, Any]] = []
    tokens: list[tuple[int, ...]] = []
    for prompt in prompts:
        first, _ = seconds(lambda prompt=prompt: generator.generate([prompt], Sampling(max_new_tokens=1)))
        took, [done] = seconds(lambda prompt=prompt: generator.generate([prompt], sampling))
        tokens.append(done.tokens)
        alone.append({"prompt": len(prompt), "first_token_s": first, "seconds": took, "new": len(done.tokens)})
        show(alone[-1])
    took, both = seconds(lambda: generator.generate(prompts, sampling))
    equal = [_agreeing(one, other.tokens) for one, other in zip(tokens, both, strict=True)]
    together = {"seconds": took, "tokens_as_alone": equal, "new": new}
    show(together)
    return {"alone": alone, "together": together, "peak": memory()}


def _agreeing(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens agree before the first that does not."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(one))


def steps(generator: Generator) -> list[dict[str, Any]]:
    """What a step of each program takes: called, as nodes of a CUDA graph, and by whose kernels."""
    rows: list[dict[str, Any]] = []
    for batch, tokens in shapes(generator):
        step, count = step_of(generator, batch, tokens), 20 if tokens == 1 else 5
        step([[7 + place for place in range(tokens)]] * batch, [LENGTH] * batch)
        row: dict[str, Any] = {"batch": batch, "tokens": tokens}
        row["call_ms"] = seconds(partial(repeat, step.again, count))[0] / count * 1e3
        row["share"] = step_share(step.again, generator.programs.artifact(batch, tokens), 5)
        row["graph_ms"] = captured_facts(lambda one: time_in_graph([one], 1, 15).median / 1e3, step.again)
        rows.append(row)
        show(row)
    return rows


@torch.no_grad()
def beside_the_model(generator: Generator, tokens: int) -> dict[str, Any]:
    """A prompt of ``tokens`` tokens in pieces, then as many token by token, in the programs and in the model as it is.

    Errors of logits are against the model in fp32 on the same weights, of which those of one layer are wide at a time.
    """
    programs, slots = generator.programs, generator.engine.slots
    narrow, wide = Eager(programs, "bfloat16"), Eager(programs, "float32")
    slots.begin(2 * tokens)
    drawn = torch.Generator().manual_seed(1)
    ids = torch.randint(3, generator.vocabulary, (2 * tokens,), generator=drawn).tolist()
    errors: dict[str, list[float]] = {"eager": [], "program": []}
    same, at = {"eager": 0, "program": 0}, 0
    for size in (*generator.engine.pieces(tokens), *[1] * tokens):
        given = ids[at : at + size]
        wanted = wide(given, at)
        found = {"eager": narrow(given, at)}
        found["program"] = programs.step(1, size, slots.staging)([given], [at])[0].float()
        for who, logits in found.items():
            errors[who].append(((logits - wanted).norm() / wanted.norm()).item())
            same[who] += int(logits.argmax() == wanted.argmax())
        slots.read(size)
        at += size
    slots.abandon()
    took, _ = seconds(partial(repeat, partial(narrow, [5], at), 5))
    medians = {who: statistics.median(each) for who, each in errors.items()}
    steps_taken = len(errors["program"])
    return {"steps": steps_taken, "median_error": medians, "same_token": same, "errors": errors} | {
        "eager_step_ms": took / 5 * 1e3
    }


class Eager:
    """The model as it is over the weights of ``programs``: in bf16, or in fp32 with those of one layer at a time."""

    def __init__(self, programs: StepPrograms, dtype: str) -> None:
        source = load_source(programs.source, replace(programs.shaped(1, 1), dtype=dtype), rows=True)
        self.module = source.load("meta").module
        own = {source.hints.prefix + name: tensor for name, tensor in programs.weights.items()}
        self.module.load_state_dict(own, strict=False, assign=True)
        lacking = [name for name, tensor in self.module.state_dict().items() if tensor.is_meta]
        if lacking:
            raise UsageError(f"no program binds {', '.join(lacking[:5])}: bind the step of one token first")
        self.device = programs.device
        rows = cache_rows(source)
        self.caches = {name: torch.zeros(1, *r.shape, dtype=r.dtype, device=self.device) for name, r in rows.items()}
        if dtype == "float32":
            for unit in _units(self.module):
                widen_while_it_runs(unit)

    def __call__(self, ids: list[int], length: int) -> torch.Tensor:
        """Logits [V] in fp32 of the last token."""
        lengths = torch.tensor([length], dtype=torch.int32, device=self.device)
        return self.module(torch.tensor([ids], device=self.device), lengths, self.caches)[0, -1].float()


def _units(module: nn.Module) -> list[nn.Module]:
    """The layers, and what has weights outside of them."""
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    layers = list(max(lists, key=lambda each: sum(p.numel() for p in each.parameters())))
    inside = {id(child) for layer in layers for child in layer.modules()}
    return layers + [m for m in module.modules() if id(m) not in inside and list(m.parameters(recurse=False))]


def widen_while_it_runs(unit: nn.Module) -> None:
    """Have the unit's weights in fp32 during its forward, and as they are before and after it."""
    kept: list[torch.Tensor] = []

    def widen(*_: Any) -> None:
        for parameter in unit.parameters():
            kept.append(parameter.data)
            parameter.data = parameter.data.float()

    def restore(*_: Any) -> None:
        for parameter, data in zip(unit.parameters(), kept, strict=True):
            parameter.data = data
        kept.clear()

    unit.register_forward_pre_hook(widen)
    unit.register_forward_hook(restore)


def step_of(generator: Generator, batch: int, tokens: int) -> BoundStep:
    """The step over the first rows of the batch, or over the sequence that is being read."""
    slots = generator.engine.slots
    return generator.programs.bound(batch, tokens, slots.first(batch) if tokens == 1 else slots.staging)


def measured(options: argparse.Namespace, config: CompileConfig) -> None:
    """All figures, written as they come."""
    vars(sys)["modules"]["fla"] = None  # its kernels tune themselves for minutes: transformers' own formulas then
    began = time.perf_counter()
    generator = Generator(
        options.model, config=config, max_batch=max(options.batch), batches=options.batch, chunks=options.chunks
    )
    slots = generator.engine.slots
    document: dict[str, Any] = {**run_facts(), "model": str(options.model), "context": generator.context}

    def write(name: str, value: Any) -> None:
        document[name] = value
        document["seconds"] = time.perf_counter() - began
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(document, indent=1) + "\n")

    write("caches_gb", sum(t.nbytes for t in [*slots.first(slots.slots).values(), *slots.staging.values()]) / GIGA)
    write("programs", bound(generator))
    weights = generator.programs.weights.values()
    write("parameters", sum(tensor.numel() for tensor in weights))
    write("weights_gb", sum(tensor.nbytes for tensor in weights) / GIGA)
    write("beside_the_model", beside_the_model(generator, options.checked))
    show(document["beside_the_model"])
    if options.only_check:
        return
    write("generation", generation(generator, options.new))
    write("steps", steps(generator))
    write("memory", memory())
    show({name: document[name] for name in ("parameters", "weights_gb", "memory", "seconds")})


def show(row: dict[str, Any]) -> None:
    """One line for who waits."""
    print(json.dumps(row), flush=True)


def main() -> None:
    """Compile one program, or measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory with config.json")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="sequences in a step")
    parser.add_argument("--chunks", type=int, nargs="+", default=[64], help="pieces in which prompts are read")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate for each prompt")
    parser.add_argument("--checked", type=int, default=24, help="tokens to compare with the model itself")
    parser.add_argument("--only-check", action="store_true", help="compare, and measure nothing else")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="override fields of config.json")
    parser.add_argument("--target", default="cuda")
    parser.add_argument("--compile", type=int, nargs=2, metavar=("B", "T"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    overrides = parse_overrides(options.set)
    config = CompileConfig(target=options.target, dtype="bfloat16", context=options.context, overrides=overrides)
    if options.compile:
        compiled(options, config)
    else:
        measured(options, config)


if __name__ == "__main__":
    main()
