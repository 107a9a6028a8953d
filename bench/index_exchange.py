"""The exchange of the indexer's candidates between ranks that share out a sequence: its time, and its bytes.

    PYTHONPATH=. torchrun --nproc-per-node 2 bench/index_exchange.py --out bench/results/index_exchange.json

Random scores, k of 2,048 a rank, twenty exchanges in a CUDA graph; of the ranks' medians the longest. Bytes are those
that all ranks put on the wire for a row: what the launch sends at least (4 limits, 256 bins, a count, 8 a winner; some
candidates of the last winner's bin come on top), what the operator's collectives send (a fixed room of 1.25 k / W),
every rank's k candidates, and all scores.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from run_facts import run_facts
from tp_step import graph_of, microseconds

from kimigraph.bench.kernels import kernel_for
from kimigraph.ir.mesh import SP_GROUP
from kimigraph.ir.ranks import join, leave
from kimigraph.ir.reference.exchange_picks import exchange_picks
from kimigraph.ir.reference.index_exchange import BINS, CANDIDATE_BYTES, bytes_a_row

PICKS, CONTEXT = 2048, 131072


def measured(batch: int, ways: int, rank: int) -> dict[str, Any]:
    """One batch: the launch against the operator's collectives, which give the same."""
    torch.manual_seed(rank)
    scores = torch.randn(batch, 1, PICKS, device="cuda")
    places = torch.stack([torch.randperm(CONTEXT // ways, device="cuda")[:PICKS].sort().values for _ in range(batch)])
    places = places.int().unsqueeze(1)
    sizes: dict[str, Any] = {"k": PICKS, "ways": ways, "run": 64, "group": SP_GROUP}
    kernel = kernel_for("exchange_picks", {"scores": scores, "places": places}, sizes)
    own, every = kernel.launch(scores, places)
    wanted = exchange_picks(scores, places, **sizes)
    same = torch.equal(own, wanted[0]) and torch.equal(every, wanted[1])
    graph, _ = graph_of(lambda: [kernel.launch(scores, places) for _ in range(20)][-1])
    kept = own.ge(0).sum(-1).float().mean()
    dist.all_reduce(kept)
    row: dict[str, Any] = {"batch": batch, "us": round(microseconds(graph, True) / 20, 2), "same": same}
    counts = bytes_a_row(PICKS, ways)
    row["bytes_a_row"] = {
        "launch, winners alone": ways * 4 * (4 + BINS + 1) + CANDIDATE_BYTES * round(float(kept)),
        "collectives": counts["pruned"],
        "all candidates": counts["unpruned"],
        "all scores": 4 * CONTEXT,
    }
    return row


def main() -> None:
    """Measure some batches and write one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="as many as torchrun starts")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    ways = options.ranks
    rank = join({"sp": ways}, "cuda")
    document: dict[str, Any] = {**run_facts(), "ways": ways, "rows": []}
    for batch in (1, 8, 64):
        row = measured(batch, ways, rank)
        document["rows"].append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    leave()


if __name__ == "__main__":
    main()
