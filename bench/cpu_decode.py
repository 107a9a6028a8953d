"""One decode step of Kimi K3.1 in fp32 on a CPU: our CPU targets beside eager and torch.compile (Inductor).

    PYTHONPATH=. python bench/cpu_decode.py --threads 2 --out bench/results/cpu_decode.json

The forms take turns, a step each, so that whatever else the machine does meets all of them alike; each has caches of
its own. Before that the results of one step are compared with eager's. Times are median, lower quartile and best of
the rounds in milliseconds, of calls as a user makes them; ``ratio`` is Inductor's time over that of the fastest of
ours. On a machine that does other things, barriers between torch's threads make its medians long: read the best.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kimigraph
from kimigraph.capture import load_source
from kimigraph.ir.accuracy import deviation
from kimigraph.ir.config import CompileConfig

EXAMPLE = Path(__file__).parent.parent / "examples" / "k31_tiny"
TARGETS = ("cpu:reference", "cpu:onnxruntime")
SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "middle": {
        "num_hidden_layers": 4,
        "vocab_size": 8192,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "q_lora_rank": 384,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "linear_attn_config.num_heads": 8,
        "linear_attn_config.head_dim": 64,
        "index_n_heads": 32,
        "index_head_dim": 64,
        "index_topk": 256,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "moe_intermediate_size": 384,
        "routed_expert_hidden_size": 384,
    },
}
"""``tiny`` is the example, dominated by what a call costs; ``middle`` by products and caches."""


def forms(model: torch.nn.Module, inputs: Callable[[], tuple[Any, ...]]) -> dict[str, Callable[..., torch.Tensor]]:
    """What is timed, compiled for these inputs."""
    made: dict[str, Callable[..., torch.Tensor]] = {"eager": model}
    for target in TARGETS:
        config = CompileConfig(target=target, report=False, cache="off")
        made[target] = kimigraph.optimize(model, inputs(), config)
    made["inductor"] = torch.compile(model)
    return made


def rounds(made: dict[str, Callable[..., torch.Tensor]], inputs: Callable[[], tuple[Any, ...]], count: int) -> Any:
    """Seconds of each form in each round."""
    given = {name: inputs() for name in made}
    taken: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(count + 5):
        for name, step in made.items():
            began = time.perf_counter()
            step(*given[name])
            if turn >= 5:
                taken[name].append(time.perf_counter() - began)
    return taken


def measure(size: str, context: int, count: int) -> dict[str, Any]:
    """One size: errors against eager, times and ratios."""
    overrides = tuple((name, str(value)) for name, value in SIZES[size].items())
    config = CompileConfig(context=context, dtype="float32", overrides=overrides)
    source = load_source(str(EXAMPLE), config)
    model, (ids, lengths, cache), _ = source.build(context // 2)

    def inputs() -> tuple[Any, ...]:
        return ids, lengths, {name: tensor.clone() for name, tensor in cache.items()}

    made = forms(model, inputs)
    want = inputs()
    reference = {"logits": model(*want), **want[2]}
    errors: dict[str, float] = {}
    for name, step in made.items():
        got = inputs()
        error = deviation({"logits": step(*got), **got[2]}, reference)
        assert error.passed, (name, error)
        errors[name] = error.relative
    taken = rounds(made, inputs, count)
    low = {name: statistics.quantiles(values, n=4)[0] * 1e3 for name, values in taken.items()}
    middle = {name: statistics.median(values) * 1e3 for name, values in taken.items()}
    best = {name: min(values) * 1e3 for name, values in taken.items()}
    ratios = {
        key: times["inductor"] / min(times[target] for target in TARGETS)
        for key, times in (("median", middle), ("lower_quartile", low), ("best", best))
    }
    return {
        "size": size,
        "context": context,
        "rounds": count,
        "relative_error": errors,
        "median_ms": middle,
        "lower_quartile_ms": low,
        "best_ms": best,
        "fastest": min(TARGETS, key=middle.__getitem__),
        "ratio": ratios,
    }


def main() -> None:
    """Measure the sizes asked for, as often as asked for, and write one document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=2, help="measurements of each size")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found: list[dict[str, Any]] = []
    with torch.no_grad():
        for size in asked.sizes * asked.repeat:
            torch.compiler.reset()
            found.append(measure(size, asked.context, asked.rounds))
            print(json.dumps(found[-1]), flush=True)
    document = {
        "command": "PYTHONPATH=. python " + " ".join(sys.argv),
        "threads": asked.threads,
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "measurements": found,
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
