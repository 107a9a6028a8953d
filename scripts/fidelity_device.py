"""Generation in bf16 on a GPU beside the model itself, both measured against the model in fp32.

``python scripts/fidelity_device.py --size mid --out FILE.json`` makes each family's model with random bf16 weights,
writes them as a checkpoint, and reads a prompt in pieces and further tokens one by one, always those that the fp32
model would generate. Its error is what rounding to bf16 costs; the program's may be 1.5 times as large. The error of a
row (the logits of a token, a token's row of a cache, a head's state) is the length of its difference over that of the
fp32 row. Compared are medians over rows: where rounding sends a token to another expert or picks another key, its rows
are far off in either program, and how often that happens is told by the mean square, which is written too.
Also told is which part of the device's time in a decode step goes to kernels of the program.
``scripts/write_fidelity.py --device`` makes tables of docs/fidelity.md of what ``--out`` wrote.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from fidelity_models import SIZES
from safetensors.torch import save_file
from torch import Tensor

from kimigraph.bench.step_share import step_share
from kimigraph.capture import load_source
from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.seeded import seeded_tensor
from kimigraph.sequence_caches import cache_rows

PROMPT, CHUNK, CONTEXT = 35, 16, 112
ALLOWED = 1.5
Trace = tuple[list[Tensor], dict[str, Tensor]]
"""Logits of the last token of each step, and caches at the end."""


def write_checkpoint(kind: str, size: str, seed: int, directory: Path) -> None:
    """``config.json`` and seeded weights, rounded to bf16 where the model in bf16 has them so."""
    (directory / "config.json").write_text(json.dumps({**SIZES[size][kind], "dtype": "bfloat16"}))
    config = CompileConfig(target="cuda", dtype="bfloat16", random_weights=True, context=64)
    source = load_source(str(directory), config, rows=True)
    state = source.load("unfilled").module.state_dict()
    values = {name: seeded_tensor(name, t.shape, t.dtype, "weight", seed) for name, t in state.items()}
    own = {name.removeprefix(source.hints.prefix): value.contiguous() for name, value in values.items()}
    save_file(own, directory / "model.safetensors")


def eager(directory: Path, dtype: str, context: int, pieces: list[list[int]], steps: int) -> tuple[Trace, list[int]]:
    """The model as it is, on ``pieces`` and then the tokens that it finds likeliest, or those given as pieces."""
    config = CompileConfig(dtype=dtype, context=context, phase="decode", tokens=1)
    source = load_source(str(directory), config, rows=True)
    module = source.loaded.module.cuda()
    rows = cache_rows(source)
    caches = {name: torch.zeros(1, *row.shape, dtype=row.dtype, device="cuda") for name, row in rows.items()}
    logits, tokens, at = list[Tensor](), list[int](), 0
    for turn in range(steps):
        given = pieces[turn] if turn < len(pieces) else [tokens[-1]]
        lengths = torch.tensor([at], dtype=torch.int32, device="cuda")
        out = module(torch.tensor([given], device="cuda"), lengths, caches)
        logits.append(out[0, -1].float())
        tokens.append(int(logits[-1].argmax().item()))
        at += len(given)
    return (logits, {name: tensor.float() for name, tensor in caches.items()}), tokens


def generated(generator: Generator, pieces: list[list[int]]) -> Trace:
    """The compiled steps on ``pieces``."""
    slots, logits, at = generator.engine.slots, list[Tensor](), 0
    slots.begin(sum(map(len, pieces)))
    for given in pieces:
        step = generator.programs.step(1, len(given), slots.staging)
        logits.append(step([given], [at])[0].float().clone())
        slots.read(len(given))
        at += len(given)
    return logits, rows_of(slots.staging, at)


def rows_of(caches: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The caches of a sequence in fp32; those in pages as rows of its ``tokens`` tokens, with zeros behind them."""
    found: dict[str, Tensor] = {}
    for name, tensor in caches.items():
        if "block_table" in caches and name.startswith("cache.") and not name.endswith("packed"):
            tensor = tensor[caches["block_table"].clamp(min=0)].flatten(1, 2).clone()
            tensor[:, tokens:] = 0
        if name != "block_table":
            found[name] = tensor.float()
    return found


def distances(found: Tensor, wanted: Tensor) -> Tensor:
    """Of each row that is not zero: the length of the difference over that of what is wanted."""
    found, wanted = found[: len(wanted)].flatten(1), wanted.flatten(1)  # pages may hold more than the context
    written = wanted.norm(dim=1) > 0
    return ((found - wanted).norm(dim=1) / wanted.norm(dim=1))[written]


def errors(found: Trace, wanted: Trace) -> dict[str, list[float]]:
    """Median and root mean square of the errors of rows: of logits, and of the caches of each kind."""
    rows = {"logits": [distances(torch.stack(found[0]), torch.stack(wanted[0]))]}
    for name in sorted(wanted[1]):
        rows.setdefault(name.rpartition(".")[2], []).append(distances(found[1][name][0], wanted[1][name][0]))
    return {
        kind: [torch.cat(each).median().item(), torch.cat(each).square().mean().sqrt().item()]
        for kind, each in rows.items()
    }


def without_fla() -> None:
    """Have transformers' models use their own formulas: kernels of fla, where it is there, tune themselves for minutes,
    and round in their own way."""
    vars(sys)["modules"]["fla"] = None


@torch.no_grad()
def compared(
    kind: str,
    size: str,
    seed: int,
    steps: int,
    *,
    chunks: tuple[int, ...] = (CHUNK,),
    **options: Any,
) -> dict[str, Any]:
    """One model of one seed: errors of eager bf16 and of the program (``options`` of its compilation)."""
    without_fla()
    with tempfile.TemporaryDirectory() as scratch:
        directory, context = Path(scratch), CONTEXT
        write_checkpoint(kind, size, seed, directory)
        generator_ = torch.Generator().manual_seed(seed)
        vocabulary = SIZES[size][kind].get("vocab_size") or SIZES[size][kind]["text_config"]["vocab_size"]
        prompt = torch.randint(3, vocabulary, (PROMPT,), generator=generator_).tolist()
        config = CompileConfig(target="cuda", dtype="bfloat16", context=context, **options)
        start = time.perf_counter()
        generator = Generator(directory, config=config, max_batch=1, chunks=chunks)
        generator.prepare([PROMPT])
        ready = time.perf_counter() - start
        sizes = generator.engine.pieces(PROMPT)
        pieces = [prompt[sum(sizes[:n]) : sum(sizes[: n + 1])] for n in range(len(sizes))]
        wanted, tokens = eager(directory, "float32", context, pieces, len(pieces) + steps - 1)
        pieces += [[token] for token in tokens[len(pieces) - 1 : -1]]
        plain, _ = eager(directory, "bfloat16", context, pieces, len(pieces))
        ours = generated(generator, pieces)
        row: dict[str, Any] = {"family": kind, "size": size, "seed": seed, "compile_seconds": ready}
        row |= {"eager": errors(plain, wanted), "program": errors(ours, wanted)}
        row["same_token"] = {
            name: sum(a.argmax().item() == b.argmax().item() for a, b in zip(t[0], wanted[0], strict=True))
            / len(wanted[0])
            for name, t in (("eager", plain), ("program", ours))
        }
        return row


@torch.no_grad()
def share(kind: str, size: str, **options: Any) -> dict[str, Any]:
    """Device time of a decode step by whose kernels it is, in microseconds a step."""
    with tempfile.TemporaryDirectory() as scratch:
        write_checkpoint(kind, size, 0, Path(scratch))
        config = CompileConfig(target="cuda", dtype="bfloat16", context=CONTEXT, **options)
        generator = Generator(scratch, config=config, max_batch=1, chunks=())
        slots = generator.engine.slots
        slots.begin(PROMPT + 1)
        step = generator.programs.bound(1, 1, slots.staging)
        for place in range(PROMPT + 1):
            step([[5 + place]], [place])
            slots.read(1)
        fusions = {entry["rule"]: entry["count"] for entry in generator.programs.reports[(1, 1)].fusions}
        found = {"family": kind, "size": size, "launches": generator.programs.reports[(1, 1)].launches["after"]}
        return found | {"fusions": fusions, "share": step_share(step.again, generator.programs.artifact(1, 1))}


def within(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By family and size: the program's error over eager bf16's, of logits or the worst kind of cache, all seeds."""
    found: dict[str, float] = {}
    for key in dict.fromkeys((row["family"], row["size"]) for row in rows):
        these = [row for row in rows if (row["family"], row["size"]) == key]
        ratios: list[float] = []
        for name in these[0]["eager"]:
            medians = [sum(row[who][name][0] for row in these) for who in ("program", "eager")]
            if medians[1] > 0:
                ratios.append(medians[0] / medians[1])
        found[" ".join(key)] = max(ratios)
    return found


def main() -> int:
    """Run what the command line asks for; 1 where an error is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=list(SIZES["tiny"]), help="default: all")
    parser.add_argument("--size", action="append", choices=list(SIZES), help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--cuda-graph", action="store_true")
    parser.add_argument("--paged", action="store_true", help="caches in pages")
    parser.add_argument("--only", choices=("errors", "share"), help="default: both")
    parser.add_argument("--out", type=Path, help="where to write what was found, as JSON")
    asked = parser.parse_args()
    torch.set_num_threads(2)
    options: dict[str, Any] = {"cuda_graph": asked.cuda_graph, "cache_layout": "paged" if asked.paged else "model"}
    found: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "device": torch.cuda.get_device_name()}
    found |= {"torch": torch.__version__, "allowed": ALLOWED, "ratios": {}, "rows": [], "shares": []}
    for kind, size in product(asked.family or SIZES["tiny"], asked.size or SIZES):
        if asked.only != "share":
            for seed in range(asked.seeds):
                found["rows"].append(compared(kind, size, seed, asked.steps, **options))
                print(json.dumps(found["rows"][-1]), flush=True)
            found["ratios"] = within(found["rows"])
        if asked.only != "errors":
            found["shares"].append(share(kind, size, **options))
            print(json.dumps(found["shares"][-1]), flush=True)
        if asked.out:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found["ratios"]))
    return 0 if max(found["ratios"].values(), default=0.0) <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
