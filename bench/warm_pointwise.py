"""Compile torch.compile's side of ``kimigraph bench pointwise`` in worker processes.

    PYTHONPATH=. python bench/warm_pointwise.py --jobs 6

Its code and kernels then lie in the caches of Inductor and Triton; its tiles it still chooses in the benchmark itself.
Nothing is timed here.
"""

import argparse
from multiprocessing import get_context

import torch

from kimigraph.bench.pointwise import TOKENS, compiled_peer
from kimigraph.bench.pointwise_chains import CHAINS
from kimigraph.bench.protocol import require_gpu


def warm(point: tuple[str, int]) -> str:
    """Compile one chain at one number of tokens, and run it once; its name."""
    name, tokens = point
    torch.compiler.reset()
    chain = next(chain for chain in CHAINS if chain.name == name)
    compiled_peer(chain)(*chain.operands(tokens))
    torch.cuda.synchronize()
    return f"{name} {tokens}"


def main() -> None:
    """Deal the points out to the workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=6)
    options = parser.parse_args()
    require_gpu()
    points = [(chain.name, tokens) for tokens in TOKENS for chain in CHAINS]
    with get_context("spawn").Pool(options.jobs) as pool:
        for name in pool.imap_unordered(warm, points):
            print(name, flush=True)


if __name__ == "__main__":
    main()
