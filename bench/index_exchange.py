"""The exchange of the indexer's candidates between ranks that share out a sequence: its time, and its bytes.

    PYTHONPATH=. torchrun --nproc-per-node 2 bench/index_exchange.py --out bench/results/index_exchange.json

The first 2,048 of random scores of a rank's share of 128k tokens, twenty exchanges in a CUDA graph; of the ranks'
medians the longest. Bytes are those that all ranks put on the wire for a row: what the launch sends (4 limits, 256
bins, 8 a contested candidate), what the operator's collectives send (a fixed room of k / 8), every rank's k candidates,
and all scores.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from run_facts import run_facts
from tp_step import graph_of, microseconds

from kimigraph.bench.kernels import kernel_for
from kimigraph.ir.mesh import SP_GROUP
from kimigraph.ir.ranks import join, leave
from kimigraph.ir.reference.collectives import over_group
from kimigraph.ir.reference.exchange_picks import exchange_picks
from kimigraph.ir.reference.index_exchange import BINS, CANDIDATE_BYTES, bytes_a_row, exchange, local_candidates
from kimigraph.ir.reference.sequence_shards import SequenceShards

PICKS, CONTEXT = 2048, 131072


def measured(batch: int, ways: int, rank: int) -> dict[str, Any]:
    """One batch: the launch against the operator's collectives, which give the same."""
    torch.manual_seed(rank)
    every = torch.randn(batch, 1, CONTEXT // ways, device="cuda")
    picks = every.topk(PICKS).indices.sort().values
    scores, places = every.gather(-1, picks), picks.int()
    sizes: dict[str, Any] = {"k": PICKS, "ways": ways, "run": 64, "group": SP_GROUP}
    kernel = kernel_for("exchange_picks", {"scores": scores, "places": places}, sizes)
    same = torch.equal(kernel.launch(scores, places), exchange_picks(scores, places, **sizes))
    graph, _ = graph_of(lambda: [kernel.launch(scores, places) for _ in range(20)][-1])
    row: dict[str, Any] = {"batch": batch, "us": round(microseconds(graph, True) / 20, 2), "same": same}
    counts, contested = bytes_a_row(PICKS, ways), contested_of(scores, places, ways, rank)
    row["bytes_a_row"] = {
        "launch": ways * 4 * (4 + BINS) + CANDIDATE_BYTES * contested,
        "collectives": counts["pruned"],
        "all candidates": counts["unpruned"],
        "all scores": 4 * CONTEXT,
    }
    return row


def contested_of(scores: torch.Tensor, places: torch.Tensor, ways: int, rank: int) -> int:
    """Candidates of all ranks in the last winner's bin, the mean of the rows."""
    own = places.flatten(0, 1)
    tokens = SequenceShards(ways).tokens(own.long(), rank)
    found = over_group(exchange(local_candidates(scores.flatten(0, 1), own >= 0, tokens, PICKS), PICKS, ways))
    return round(float(found.contested.float().mean()))


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
