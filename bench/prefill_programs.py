"""Programs of a prompt of Kimi K3.1 at width as generation takes it, for one GPU and for ranks that take stretches.

    PYTHONPATH=. python bench/prefill_programs.py --tokens 65536 --layers 4 --programs programs
    PYTHONPATH=. torchrun --nproc-per-node 2 bench/tp_step.py --form sp2 --programs programs --names p65536 --out FILE

They give the logits of the last token. Cubins are for H200s, so any machine can make them.
"""

import argparse
from pathlib import Path

from kimigraph.capture import load_source
from kimigraph.compiler import compile_model
from kimigraph.ir.config import CompileConfig

SOURCE = "examples/k31"


def main() -> None:
    """Compile both programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--programs", type=Path, required=True)
    options = parser.parse_args()
    overrides = (("num_hidden_layers", str(options.layers)),)
    for name, ranks in (("tp1", 1), ("sp2", 2)):
        config = CompileConfig(
            batch=1, phase="prefill", tokens=options.tokens, context=options.tokens, dtype="bfloat16",
            target="cuda:sm_90", overrides=overrides, sp=ranks, report=False,
        )  # fmt: skip
        directory = options.programs / f"p{options.tokens}-{name}"
        report = compile_model(SOURCE, load_source(SOURCE, config, rows=True), config, directory, print)
        print(directory, report.launches, report.graph["estimated_us"], flush=True)


if __name__ == "__main__":
    main()
