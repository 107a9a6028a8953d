"""Cold compilation of a decode step of Kimi K3.1 on a GPU: kimigraph, torch.compile, and its max-autotune mode.

    PYTHONPATH=. python bench/cold_compile.py --layers 4 --out bench/results/cold_compile.json

Each compiles in a process of its own whose caches are empty. Seconds count from the built model and its inputs on the
GPU to the end of the first step (with CUDA graphs, where the mode makes some, to the end of the third).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kimigraph.ir.env import environment_with

CONFIG = Path(__file__).parent.parent / "examples" / "k31" / "config.json"
COMPILERS = ("kimigraph", "default", "max-autotune")
READY = "READY "


def random_step(layers: int, context: int) -> tuple[Any, tuple[Any, ...]]:
    """K3.1 at width with random weights on the GPU (every second layer sparse), and arguments of one step."""
    import torch

    from kimigraph.models.kimi_k31 import KimiK31Config, KimiK31ForCausalLM, new_cache

    document = json.loads(CONFIG.read_text(encoding="utf-8"))
    document["num_hidden_layers"] = layers
    numbers = range(1, layers + 1)
    document["linear_attn_config"]["full_attn_layers"] = [number for number in numbers if number % 4 == 0]
    document["linear_attn_config"]["kda_layers"] = [number for number in numbers if number % 4]
    model = KimiK31ForCausalLM(KimiK31Config.from_dict(document, ()), device="cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    cache = new_cache(model.config, 1, context, model.config.torch_dtype, "cuda")
    ids = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
    return model, (ids, torch.full((1,), context - 2, dtype=torch.int32, device="cuda"), cache)


def measure(compiler: str, layers: int, context: int) -> dict[str, Any]:
    """Seconds of one compiler, and of its parts where it tells them."""
    import torch

    model, args = random_step(layers, context)
    torch.cuda.synchronize()
    start = time.perf_counter()
    parts: dict[str, Any] = {}
    with torch.no_grad():
        if compiler == "kimigraph":
            import kimigraph

            config = kimigraph.CompileConfig(target="cuda", cache="off", report=False)
            compiled: Any = kimigraph.optimize(model, args, config)
            parts = compiled.report().timing
        else:
            compiled = torch.compile(model, dynamic=False, mode=None if compiler == "default" else compiler)
        compiled(*args)
        torch.cuda.synchronize()
        first = time.perf_counter() - start
        for _ in range(2):
            compiled(*args)
        torch.cuda.synchronize()
    seconds = first if compiler != "max-autotune" else time.perf_counter() - start
    return {"seconds": round(seconds, 2), "first_step": round(first, 2), "parts": parts}


def run(compiler: str, options: argparse.Namespace) -> dict[str, Any]:
    """One measured process with empty caches; what went wrong, where it did not end well."""
    with tempfile.TemporaryDirectory() as empty:
        names = {
            "TRITON_CACHE_DIR": "triton",
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "KIMIGRAPH_CACHE_DIR": "kimigraph",
        }
        environment = environment_with(**{name: str(Path(empty) / folder) for name, folder in names.items()})
        sizes = ["--layers", str(options.layers), "--context", str(options.context)]
        command = [sys.executable, sys.argv[0], *sizes, "--measure", compiler]
        try:
            ran = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=options.limit
            )
        except subprocess.TimeoutExpired:
            return {"seconds": None, "at_least": options.limit, "error": f"not done after {options.limit} s"}
    lines = [line for line in ran.stdout.splitlines() if line.startswith(READY)]
    if ran.returncode or not lines:
        return {"seconds": None, "error": ran.stderr.strip()[-400:]}
    return json.loads(lines[-1].removeprefix(READY))


def main() -> None:
    """Measure each compiler and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--only", choices=COMPILERS, nargs="+", default=list(COMPILERS))
    parser.add_argument("--limit", type=int, default=1200, help="seconds that one compilation may take")
    parser.add_argument("--measure", choices=COMPILERS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.measure:
        print(READY + json.dumps(measure(options.measure, options.layers, options.context)))
        return
    from run_facts import run_facts

    rows: dict[str, Any] = {}
    for compiler in options.only:
        rows[compiler] = run(compiler, options)
        print(compiler, json.dumps(rows[compiler]), flush=True)
    own = rows.get("kimigraph", {}).get("seconds")
    document = {
        **run_facts(),
        "processors": os.cpu_count(),
        "layers": options.layers,
        "context": options.context,
        "compilers": rows,
        "times_faster": {
            name: round(row["seconds"] / own, 2) for name, row in rows.items() if own and row.get("seconds")
        },
        "times_faster_at_least": {
            name: round(row["at_least"] / own, 2) for name, row in rows.items() if own and "at_least" in row
        },
    }
    print(json.dumps(document, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
