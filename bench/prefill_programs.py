"""Programs of a prompt of Kimi K3.1 at width as generation takes it, for one GPU and for two.

    PYTHONPATH=. python bench/prefill_programs.py --tokens 65536 --programs programs
    PYTHONPATH=. python bench/prefill_programs.py --programs programs --disable-pass overlap-communication
    PYTHONPATH=. torchrun --nproc-per-node 2 bench/tp_step.py --form sp2 --programs programs --names p65536 --out FILE

They give the logits of the last token; ``tp2`` shares out heads and widths, ``sp2`` the tokens. Names of those without
a pass end in ``off``. Cubins are for H200s, so any machine can make them.
"""

import argparse
from pathlib import Path
from typing import Any

from kimigraph.capture import load_source
from kimigraph.compiler import compile_model
from kimigraph.ir.config import CompileConfig

SOURCE = "examples/k31"
FORMS: dict[str, dict[str, Any]] = {"tp1": {}, "tp2": {"tp": 2}, "sp2": {"sp": 2}}


def compiled(directory: Path, tokens: int, context: int, layers: int, **fields: Any) -> None:
    """Compile the step that reads so many tokens of a prompt, with caches for ``context``."""
    config = CompileConfig(
        batch=1, phase="prefill", tokens=tokens, context=context, dtype="bfloat16", target="cuda:sm_90",
        overrides=(("num_hidden_layers", str(layers)),), report=False, **fields,
    )  # fmt: skip
    report = compile_model(SOURCE, load_source(SOURCE, config, rows=True), config, directory, print)
    print(directory, report.launches, report.graph["estimated_us"], flush=True)


def main() -> None:
    """Compile all programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--disable-pass", metavar="NAME", help="leave a pass out")
    parser.add_argument("--programs", type=Path, required=True)
    options = parser.parse_args()
    tokens, left_out = options.tokens, (options.disable_pass,) if options.disable_pass else ()
    for name, ranks in FORMS.items():
        directory = options.programs / f"p{tokens}{'off' if left_out else ''}-{name}"
        compiled(directory, tokens, tokens, options.layers, disabled_passes=left_out, **ranks)


if __name__ == "__main__":
    main()
