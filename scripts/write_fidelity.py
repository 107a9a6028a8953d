"""Compare generation with the models themselves, in fp32, and write the table of docs/fidelity.md.

``python scripts/write_fidelity.py`` runs each family with three seeds and 64 greedy tokens; ``--json`` prints what it
found instead of writing the page. Models of transformers run in processes of their own (fidelity_reference.py).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from fidelity_models import MODELS
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimigraph.generator import Generator
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.env import compiler_environment
from kimigraph.ir.seeded import seeded_tensor

PAGE = Path(__file__).parents[1] / "docs" / "fidelity.md"
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

Generated text is that of the model: `python scripts/write_fidelity.py` wrote this page. Tiny models of each family
with random weights, in fp32 on `cpu:reference`: a prompt of 19 tokens read in pieces of 8 and token by token, then
{steps} greedy tokens, against transformers (in a process of its own, one step for the whole prompt, static cache,
directory written by `save_pretrained`); Kimi K3.1 against `kimigraph.models` run as it is. Errors are the largest
absolute difference over the largest magnitude; none may exceed {tolerance:g}.

| family | seed | logits, prompt | logits, decode | caches and states | greedy tokens |
|---|---|---|---|---|---|
"""
FUSIONS = """
What the passes found, in the decode step and in a piece of the prompt:

| family | phase | {columns} |
|---|---|{rule}|
"""


def reference(kind: str, seed: int, steps: int, context: int, directory: Path) -> dict[str, Tensor]:
    """A checkpoint of the model in ``directory``, and what the model does by itself."""
    config = directory / "asked.json"
    config.write_text(json.dumps(MODELS[kind]))
    if kind == "kimi_k31":
        return _plain(kind, seed, steps, context, directory)
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
def _plain(kind: str, seed: int, steps: int, context: int, directory: Path) -> dict[str, Tensor]:
    from kimigraph.models.kimi_k31 import KimiK31Config, KimiK31ForCausalLM, new_cache

    (directory / "config.json").write_text(json.dumps(MODELS[kind]))
    config = KimiK31Config.from_dict(MODELS[kind])
    model = KimiK31ForCausalLM(config)
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


def compared(kind: str, seed: int, steps: int) -> dict[str, Any]:
    """What generation makes of a model, beside what the model makes."""
    context = PROMPT + steps
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        wanted = reference(kind, seed, steps, context, directory)
        config = CompileConfig(target="cpu:reference", context=context)
        generator = Generator(directory, config=config, max_batch=1, chunks=(CHUNK,))
        logits, tokens, caches = _generated(generator, wanted["prompt"].tolist(), steps)
        reports = generator.programs.reports
        read = len(wanted["prompt"])
        names = sorted(name for name in wanted if name.startswith(("cache.", "state.")))
        assert names == sorted(caches), (names, sorted(caches))
        return {
            "family": kind,
            "seed": seed,
            "prompt": _error(logits[:read], wanted["logits"][:read]),
            "decode": _error(logits[read:], wanted["logits"][read:]) if steps > 1 else 0.0,
            "caches": max(_error(caches[name], wanted[name]) for name in names),
            "tokens": tokens == wanted["tokens"].tolist(),
            "fusions": {
                phase: {entry["rule"]: entry["count"] for entry in reports[key].fusions}
                for phase, key in (("decode", (1, 1)), ("prompt", (1, CHUNK)))
            },
        }


def _generated(generator: Generator, prompt: list[int], steps: int) -> tuple[Tensor, list[int], dict[str, Tensor]]:
    """Logits of every position, greedy tokens, and the caches at the end."""
    caches, written = generator.engine.slots.staging, 0
    logits, tokens = list[Tensor](), list[int]()
    pieces = generator.engine.pieces(len(prompt))
    while len(tokens) < steps:
        size = pieces.pop(0) if pieces else 1
        given = prompt[written : written + size] or [tokens[-1]]
        logits.append(generator.programs.step(1, size, caches).logits([given], [written])[0].clone())
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
        text += f"| `{row['family']}` | {row['seed']} | {errors} | {'equal' if row['tokens'] else 'DIFFER'} |\n"
    text += FUSIONS.format(columns=" | ".join(NAMED.values()), rule="---|" * len(NAMED))[:-2] + "\n"
    for row in (row for row in rows if row["seed"] == rows[0]["seed"]):
        for phase, counts in row["fusions"].items():
            cells = " | ".join(str(counts.get(name, 0)) for name in NAMED)
            text += f"| `{row['family']}` | {phase} | {cells} |\n"
    return text


def main() -> int:
    """Run what the command line asks for; 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for kind in asked.family or MODELS:
        for seed in range(asked.seeds):
            rows.append(compared(kind, seed, asked.steps))
            print({key: value for key, value in rows[-1].items() if key != "fusions"}, file=sys.stderr, flush=True)
    if asked.json:
        print(json.dumps(rows))
    else:
        PAGE.write_text(page(rows, asked.steps), encoding="utf-8")
    good = all(row["tokens"] and max(row["prompt"], row["decode"], row["caches"]) <= TOLERANCE for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
