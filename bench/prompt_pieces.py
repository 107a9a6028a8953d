"""What a piece of a long prompt takes by its size: Kimi K3.1 at width, called from Python and as a CUDA graph.

    PYTHONPATH=. python bench/prompt_pieces.py --programs programs --make
    PYTHONPATH=. python bench/prompt_pieces.py --programs programs --out bench/results/prompt_pieces.json

The first makes the programs, on any machine, the second times them on an H200, behind as many tokens as five even
places of a prompt have. ``prompt_ms`` is the mean over these, for all pieces of the prompt.
"""

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prefill_programs import compiled
from run_facts import run_facts
from tp_step import Calls, arguments, bound, graph_of, microseconds

SIZES, PLACES = (8, 64, 512, 2048, 4096), 5


def measured(directory: Path, tokens: int) -> dict[str, Any]:
    """Milliseconds of a piece, and of all pieces of a prompt, both ways."""
    executor = bound(directory, 0)
    given, size = arguments(executor, 0), int(executor.manifest.info["tokens"])
    [lengths] = [tensor for tensor, spec in zip(given, executor.caller_inputs, strict=True) if spec.source == "lengths"]
    step = partial(executor, *given)
    forms, row = {"called": Calls(step), "graph": graph_of(step)[0]}, dict[str, Any](tokens=size)
    for name, form in forms.items():
        found: list[float] = []
        for place in range(PLACES):
            lengths.fill_(place * (tokens - size) // (PLACES - 1))
            found.append(microseconds(form, False, 11) / 1e3)
        row[f"{name}_ms"] = [round(one, 3) for one in found]
        row[f"{name}_prompt_ms"] = round(statistics.mean(found) * tokens / size, 1)
    return row


def main() -> None:
    """Make the programs, or measure them and write one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=65536, help="of the prompt, and of the caches")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--make", action="store_true", help="compile the programs and stop")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.make:
        for size in SIZES:
            compiled(options.programs / f"t{size}", size, options.tokens, options.layers)
        return
    document: dict[str, Any] = {**run_facts(), "prompt": options.tokens, "layers": options.layers, "rows": []}
    for size in SIZES:
        document["rows"].append(measured(options.programs / f"t{size}", options.tokens))
        print(json.dumps(document["rows"][-1]), flush=True)
        torch.cuda.empty_cache()
        if options.out is not None:
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
