"""Compare generation with the models themselves, in fp32, and write the table of docs/fidelity.md.

``python scripts/write_fidelity.py`` runs each family, tiny and mid-size, with three seeds and 64 greedy tokens;
``--json`` prints what it found instead of writing the page. Models of transformers run in processes of their own
(fidelity_reference.py). ``--device`` runs nothing: it makes the page's part about a GPU anew from
bench/results/fidelity.json, which fidelity_device.py writes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from fidelity_models import MODELS, SIZES
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.env import compiler_environment
from kimigraph.ir.seeded import seeded_tensor

PAGE = Path(__file__).parents[1] / "docs" / "fidelity.md"
DEVICE_RUN = Path(__file__).parents[1] / "bench" / "results" / "fidelity.json"
PROMPT, CHUNK = 19, 8
TOLERANCE = 1e-4
NAMED = {
    "raise-kda": "KDA",
    "raise-attention-residual": "residuals",
    "raise-cache-writes": "cache writes",
    "raise-norms": "norms",
    "raise-moe": "experts",
    "fuse-lightning-indexer": "indexer",
    "fuse-sparse-attention": "attention",
    "merge-horizontal": "merged",
    "fuse-pointwise": "pointwise",
}
HEAD = """# Fidelity

Generated text is that of the model: `python scripts/write_fidelity.py` wrote this page. Models of each family with
random weights, tiny ones and ones with the head widths of the published models (`mid`), in fp32 on `cpu:reference`: a
prompt of 19 tokens read in pieces of 8 and token by token, then {steps} greedy tokens, against transformers (in a
process of its own, one step for the whole prompt, static cache, directory written by `save_pretrained`); Kimi K3 and
K3.1 against `kimigraph.models` run as they are. Logits are those of the last token of each step. Errors are the
largest absolute difference over the largest magnitude; none may exceed {tolerance:g}.

| family | size | seed | logits, prompt | logits, decode | caches and states | greedy tokens |
|---|---|---|---|---|---|---|
"""
FUSIONS = """
What the passes found in the tiny models, in the decode step and in a piece of the prompt:

| family | phase | {columns} |
|---|---|{rule}|
"""
ON_DEVICE = "## In bf16 on a GPU"
DEVICE_HEAD = """
`python scripts/fidelity_device.py --out bench/results/fidelity.json` on {device}, torch {torch}: a prompt of 35 tokens
in pieces of 16 and token by token, then tokens that the model in fp32 would generate, in programs of bf16 weights and
in the model as it is in bf16, both held against the model in fp32. An error is the length of a row's difference over
that of the row (logits of a step; a token's row of a cache; a head's state): the median over rows, as a mean over
seeds. The program's may be {allowed} times the model's: `worst` is the largest such quotient, over logits and every
kind of cache. Same token: the steps whose likeliest token is that of fp32, to which random models have others near.
A model without a row has not been compared there yet.

| family | size | seeds | logits, model | logits, program | worst | same token, model | same token, program |
|---|---|---|---|---|---|---|---|
"""
SHARE_HEAD = """
Where the device's time of a decode step of the mid-size models goes, one sequence, in microseconds:

| family | kernels of the program | products of libraries | other | share of the program |
|---|---|---|---|---|
"""


def reference(document: dict[str, Any], seed: int, steps: int, context: int, directory: Path) -> dict[str, Tensor]:
    """A checkpoint of the model in ``directory``, and what the model does by itself."""
    config = directory / "asked.json"
    config.write_text(json.dumps(document))
    if document["model_type"].startswith("kimi_k3"):
        return _plain(document, seed, steps, context, directory)
    command = [sys.executable, "-P", Path(__file__).with_name("fidelity_reference.py"), config, directory]
    subprocess.run(
        [str(part) for part in (*command, seed, PROMPT, steps, context)],
        env={**compiler_environment(), "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if "--json" in sys.argv else None,
    )
    return load_file(directory / "reference.safetensors")


@torch.no_grad()
def _plain(document: dict[str, Any], seed: int, steps: int, context: int, directory: Path) -> dict[str, Tensor]:
    from kimigraph.capture.kimi_source import empty_model, read_model_config
    from kimigraph.models.kimi_k31 import new_cache

    (directory / "config.json").write_text(json.dumps(document))
    config = read_model_config(document)
    model = empty_model(config, "cpu")
    for name, tensor in model.state_dict().items():
        tensor.copy_(seeded_tensor(name, tensor.shape, tensor.dtype, "weight", seed))
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, directory / "model.safetensors"
    )
    caches, lengths = new_cache(config, 1, context), torch.zeros(1, dtype=torch.int32)
    ids = torch.randint(3, config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
    logits, tokens, given = list[Tensor](), list[int](), ids
    for _ in range(steps):
        logits.append(model(given, lengths, caches)[0])
        lengths = lengths + given.shape[1]
        given = logits[-1][-1:].argmax(-1, keepdim=True)
        tokens.append(int(given.item()))
    return {"prompt": ids[0], "tokens": torch.tensor(tokens), "logits": torch.cat(logits), **caches}


def compared(kind: str, size: str, seed: int, steps: int) -> dict[str, Any]:
    """What generation makes of a model, beside what the model makes."""
    context = PROMPT + steps
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        wanted = reference(SIZES[size][kind], seed, steps, context, directory)
        config = CompileConfig(target="cpu:reference", context=context)
        generator = Generator(directory, config=config, max_batch=1, chunks=(CHUNK,))
        logits, tokens, caches = _generated(generator, wanted["prompt"].tolist(), steps)
        reports = generator.programs.reports
        places, read = seen_positions(generator.engine.pieces(len(wanted["prompt"])), steps)
        names = sorted(name for name in wanted if name.startswith(("cache.", "state.")))
        assert names == sorted(caches), (names, sorted(caches))
        return {
            "family": kind,
            "size": size,
            "seed": seed,
            "prompt": _error(logits[:read], wanted["logits"][places[:read]]),
            "decode": _error(logits[read:], wanted["logits"][places[read:]]) if steps > 1 else 0.0,
            "caches": max(_error(caches[name], wanted[name]) for name in names),
            "tokens": tokens == wanted["tokens"].tolist(),
            "fusions": {
                phase: {entry["rule"]: entry["count"] for entry in reports[key].fusions}
                for phase, key in (("decode", (1, 1)), ("prompt", (1, CHUNK)))
            },
        }


def seen_positions(pieces: list[int], steps: int) -> tuple[list[int], int]:
    """The positions whose logits a generation of that many tokens sees, the last of each step; and how many of them
    lie in the prompt."""
    sizes = [*pieces, *[1] * (steps - 1)]
    return [sum(sizes[: count + 1]) - 1 for count in range(len(sizes))], len(pieces)


def _generated(generator: Generator, prompt: list[int], steps: int) -> tuple[Tensor, list[int], dict[str, Tensor]]:
    """Logits of the last position of each step, greedy tokens, and the caches at the end."""
    caches, written = generator.engine.slots.staging, 0
    logits, tokens = list[Tensor](), list[int]()
    pieces = generator.engine.pieces(len(prompt))
    while len(tokens) < steps:
        size = pieces.pop(0) if pieces else 1
        given = prompt[written : written + size] or [tokens[-1]]
        logits.append(generator.programs.step(1, size, caches)([given], [written]).clone())
        written += size
        if not pieces and written >= len(prompt):
            tokens.append(int(logits[-1][-1].argmax().item()))
    return torch.cat(logits), tokens, caches


def _error(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def page(rows: list[dict[str, Any]], steps: int) -> str:
    """The text of docs/fidelity.md."""
    text = HEAD.format(steps=steps, tolerance=TOLERANCE)
    for row in rows:
        errors = " | ".join(f"{row[name]:.1e}" for name in ("prompt", "decode", "caches"))
        tokens = "equal" if row["tokens"] else "DIFFER"
        text += f"| `{row['family']}` | {row['size']} | {row['seed']} | {errors} | {tokens} |\n"
    text += FUSIONS.format(columns=" | ".join(NAMED.values()), rule="---|" * len(NAMED))[:-2] + "\n"
    for row in (row for row in rows if (row["size"], row["seed"]) == (rows[0]["size"], rows[0]["seed"])):
        for phase, counts in row["fusions"].items():
            cells = " | ".join(str(counts.get(name, 0)) for name in NAMED)
            text += f"| `{row['family']}` | {phase} | {cells} |\n"
    return text


def device_part(found: dict[str, Any]) -> str:
    """The page's part about a GPU."""
    text = ON_DEVICE + "\n" + DEVICE_HEAD.format(**{name: found[name] for name in ("device", "torch", "allowed")})
    for key, worst in found["ratios"].items():
        rows = [row for row in found["rows"] if f"{row['family']} {row['size']}" == key]
        family, size = key.split()
        errors, same = (
            [sum(pick(row, who) for row in rows) / len(rows) for who in ("eager", "program")]
            for pick in (lambda row, who: row[who]["logits"][0], lambda row, who: row["same_token"][who])
        )
        cells = [f"{value:.2%}" for value in errors] + [f"{worst:.2f}"] + [f"{value:.0%}" for value in same]
        text += f"| `{family}` | {size} | {len(rows)} | {' | '.join(cells)} |\n"
    text += SHARE_HEAD
    for row in found["shares"]:
        share = row["share"]
        cells = [*(f"{share[name]:.1f}" for name in ("program", "products", "other")), f"{share['part']:.1%}"]
        text += f"| `{row['family']}` | {' | '.join(cells)} |\n"
    return text


def with_device_part(text: str) -> str:
    """The page with its part about a GPU as the last run there has it."""
    return text.partition(f"\n{ON_DEVICE}")[0].rstrip("\n") + "\n\n" + device_part(json.loads(DEVICE_RUN.read_text()))


def main() -> int:
    """Run what the command line asks for; 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--size", action="append", choices=list(SIZES), help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", action="store_true")
    asked = parser.parse_args()
    if asked.device:
        PAGE.write_text(with_device_part(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    asked_for = [(kind, size) for kind in asked.family or MODELS for size in asked.size or SIZES]
    for kind, size in asked_for:
        for seed in range(asked.seeds):
            rows.append(compared(kind, size, seed, asked.steps))
            print({key: value for key, value in rows[-1].items() if key != "fusions"}, file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps(rows))
    else:
        PAGE.write_text(with_device_part(page(rows, asked.steps)), encoding="utf-8")
    good = all(row["tokens"] and max(row["prompt"], row["decode"], row["caches"]) <= TOLERANCE for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
