"""``kimigraph bench dsa``: the pair of a decode step, indexer then attention, in one graph over fp8 pages of one table.

The indexer lists rows of the cache and attention reads them, as ``fuse-indexer-attention`` leaves them. The peer is
DeepGEMM's logits, the fastest top-k and FlashMLA in one graph; its positions are not translated into rows, which is in
its favour: FlashMLA reads lists that were made before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from types import ModuleType
from typing import Any

import torch

from kimigraph.bench import lightning_indexer, sparse_attention
from kimigraph.bench.graph_nodes import graph_nodes
from kimigraph.bench.kda import machine
from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.lightning_indexer import IndexerInputs
from kimigraph.bench.peers import PAIR_PEERS, PeerUnavailableError, adaptor
from kimigraph.bench.protocol import relative_error, require_gpu, time_in_graph
from kimigraph.bench.sparse_attention import LATENT, PICKS, ROPE, ROW, SCALE, TOLERANCE, AttentionInputs
from kimigraph.ir.descriptors import LatentDescriptor
from kimigraph.ir.errors import NumericsError

HEADS, PAGE = 64, 64
POINTS = tuple((batch, length) for batch in (1, 8, 64) for length in (8192, 32768, 131072))
FORM = str(LatentDescriptor("paged", "float8_e4m3fn", LATENT, ROPE, PAGE, 1, 128, "scales_rope", "power2"))
PATTERN = 1 << 15  # different rows of the latent cache


@dataclass(frozen=True)
class PairInputs:
    """An indexer's inputs, and a latent cache with the same pages."""

    indexer: IndexerInputs
    q: torch.Tensor
    latent: torch.Tensor

    def attention(self, rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The attention's operands in schema order, over listed rows."""
        return self.q[..., :LATENT], self.q[..., LATENT:], self.latent, None, rows, None, None

    def listed(self, lists: torch.Tensor) -> AttentionInputs:
        """The same for peers and for the reference: lists of rows of one pool."""
        return AttentionInputs(self.q, self.latent.view(-1, ROW), lists)


def inputs(batch: int, length: int) -> PairInputs:
    """Random index keys as in ``bench li``; rows of latents repeat after a while, at addresses of their own."""
    indexer = lightning_indexer.inputs(batch, length)
    some = sparse_attention.random_rows(PATTERN)
    latent = torch.empty(len(indexer.pages) * PAGE, ROW, dtype=torch.uint8, device="cuda")
    for start in range(0, len(latent), PATTERN):
        part = latent[start : start + PATTERN]
        part.copy_(some[: len(part)])
    q = (torch.randn(batch, 1, HEADS, LATENT + ROPE, device="cuda") / 10).bfloat16()
    return PairInputs(indexer, q, latent.view(-1, PAGE, ROW))


def kernels(given: PairInputs) -> tuple[ModuleType, ModuleType]:
    """The two kernels that the compiler writes."""
    names = ("q", "keys", "weights", "lengths", "mask", "block_table")
    tensors: dict[str, torch.Tensor | None] = dict(zip(names, given.indexer.operands(0), strict=True))
    attributes = {"k": PICKS, "scale": 1.0, "descriptor": lightning_indexer.FORM, "rows": True}
    index = kernel_for("lightning_indexer", tensors, attributes)
    names = ("q_latent", "q_rope", "latent", "rope", "indices", "block_table", "sink")
    rows = index.launch(*given.indexer.operands(0))
    tensors = dict(zip(names, given.attention(rows), strict=True))
    return index, kernel_for("sparse_attention", tensors, {"scale": SCALE, "descriptor": FORM, "rows": True})


def check(where: str, given: PairInputs, number: int, rows: torch.Tensor, out: torch.Tensor) -> float:
    """The error of the last sequence's output. NumericsError where it or a list is wrong."""
    batch = len(given.q)
    for row in {0, batch - 1}:
        page = torch.empty(len(given.indexer.pages), dtype=torch.int32, device="cuda")
        table = given.indexer.tables[number, row].long()
        page[table] = torch.arange(len(table), dtype=torch.int32, device="cuda")
        positions = rows.clone()
        positions[row] = page[rows[row].long() // PAGE] * PAGE + rows[row] % PAGE
        lightning_indexer.check(where, positions, given.indexer, number, row)
    listed = given.listed(rows.unsqueeze(0))
    error = relative_error(out[-1, 0], sparse_attention.expected(listed, 0, batch - 1)[0])
    if not error <= TOLERANCE:
        raise NumericsError(f"{where}: {error:.2e} of the norm off the fp64 reference")
    return error


def point(batch: int, length: int, peers: Sequence[str]) -> dict[str, Any]:
    """One shape: cold caches, both of our launches a call."""
    where = f"pair B {batch} L {length}"
    given = inputs(batch, length)
    index, attend = kernels(given)

    def call(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = index.launch(*given.indexer.operands(number))
        return rows, attend.launch(*given.attention(rows))[0]

    count = len(given.indexer.q)
    errors = [check(where, given, number, *call(number)) for number in (0, count - 1)]
    time = time_in_graph([partial(call, number) for number in range(count)])
    floor = batch * (length * lightning_indexer.KEY_BYTES + PICKS * ROW) / lightning_indexer.BYTES_AT_RATE
    found: dict[str, Any] = {"batch": batch, "length": length, "k": PICKS, "heads": HEADS}
    found["ours"] = {
        "us": time.as_dict(),
        "error": float(f"{max(errors):.3g}"),
        "route": f"{index.CONSTANTS['route']}; {attend.CONSTANTS['route']}",
        "nodes": graph_nodes(partial(call, 0)),
    }
    found |= {"floor_us": round(floor, 2), "peers": {}}
    lists = torch.stack([call(number)[0] for number in range(min(count, 16))])
    for name in (name for name in PAIR_PEERS if name in peers):
        try:
            calls, record = adaptor(name).pair(given, lists, SCALE)
            other = time_in_graph(calls)
            entry = {"us": other.as_dict(), "ratio": round(other.median / time.median, 3)}
            found["peers"][name] = {**entry, **record, "nodes": graph_nodes(calls[0])}
        except PeerUnavailableError as reason:
            found["peers"][name] = {"unavailable": str(reason)}
    return found


def run(peers: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """All points. The document for ``--json``.

    Raises UsageError without a GPU and NumericsError when our result is wrong at a point.
    """
    require_gpu()
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": machine(), "points": []}
    for shape in POINTS:
        document["points"].append(point(*shape, peers))
        say(line(document["points"][-1]))
    document["geometric_mean_ratio"] = {}
    for name in peers:
        ratios = [one["peers"][name]["ratio"] for one in document["points"] if "ratio" in one["peers"].get(name, {})]
        if ratios:
            document["geometric_mean_ratio"][name] = round(geometric_mean(ratios), 3)
            say(f"{name}: geometric mean of the ratios {geometric_mean(ratios):.3f}, worst {min(ratios):.3f}")
    return document


def line(found: dict[str, Any]) -> str:
    """A point for people."""
    ours = found["ours"]
    text = f"B {found['batch']} L {found['length']}: {ours['us']['median']:.2f} us, floor {found['floor_us']:.2f}"
    text += f", {ours['nodes']['kernels']} kernels, {ours['nodes']['memsets']} memsets, error {ours['error']:.1e}"
    for name, peer in found["peers"].items():
        text += f" | {name} " + (
            f"{peer['us']['median']:.2f} us, ratio {peer['ratio']:.2f}" if "us" in peer else peer["unavailable"]
        )
    return text
