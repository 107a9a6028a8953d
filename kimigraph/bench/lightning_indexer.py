"""``kimigraph bench li``: scores and exact top k of a decode step over fp8 pages; correctness first, then peers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from kimigraph.bench.graph_nodes import graph_nodes
from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.peers import INDEXER_PEERS, PeerUnavailableError, adaptor
from kimigraph.bench.protocol import Timing, sets_for_cold_cache, time_in_graph
from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.reference.lightning_indexer import lightning_indexer

HEADS, WIDTH, PAGE = 64, 128, 64
KEY_BYTES = WIDTH + 4
POINTS = tuple(
    (batch, length, picks) for picks in (2048, 128) for batch in (1, 8, 64) for length in (8192, 32768, 131072)
)
TIED = ((1, 131072, 2048), (64, 8192, 2048))  # points at which rows of one score are timed, too
FORM = str(IndexKeyDescriptor("paged", "float8_e4m3fn", WIDTH, page_size=PAGE, scales="power2"))
BYTES_AT_RATE = 4.3e6  # bytes a microsecond that a copy streams
FILL = 1 << 15  # pages filled at once
RECALL_MARGIN = 1e-3  # of the largest score: what fp8 products may differ by from fp32 ones


@dataclass(frozen=True)
class IndexerInputs:
    """``sets`` of operands over one pool of pages, no page in two of them."""

    q: torch.Tensor
    weights: torch.Tensor
    pages: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor

    def operands(self, number: int) -> tuple[torch.Tensor | None, ...]:
        """One call's operands in schema order."""
        return self.q[number], self.pages, self.weights[number], self.lengths, None, self.tables[number]


def inputs(batch: int, length: int, kind: str = "gaussian", sets: int | None = None) -> IndexerInputs:
    """Random queries and keys; "equal" keys make rows of one score, "half" rows of which half the scores are 0."""
    count = sets_for_cold_cache(batch * length * KEY_BYTES) if sets is None else sets
    number = count * batch * length // PAGE
    pages = torch.empty(number, PAGE * KEY_BYTES, dtype=torch.uint8, device="cuda")
    for start in range(0, number, FILL):
        some = pages[start : start + FILL]
        values = torch.randn(len(some), PAGE * WIDTH, device="cuda")
        values = torch.ones_like(values) if kind == "equal" else values
        some[:, : PAGE * WIDTH] = values.to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.rand(len(some), PAGE, device="cuda") * 0.02 + 0.01
        scales = torch.ones_like(scales) if kind == "equal" else scales
        some[:, PAGE * WIDTH :] = scales.view(torch.uint8)
    q = torch.randn(count, batch, 1, HEADS, WIDTH, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(count, batch, 1, HEADS, device="cuda")
    if kind == "half":
        weights[..., 1:] = 0.0
        weights.abs_()
    tables = torch.randperm(number, device="cuda").to(torch.int32).view(count, batch, -1)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    return IndexerInputs(q, weights, pages.view(number, PAGE, KEY_BYTES), tables, lengths)


def kernel_of(given: IndexerInputs, picks: int) -> ModuleType:
    """The kernel that the compiler writes for these operands."""
    names = ("q", "keys", "weights", "lengths", "mask", "block_table")
    tensors: dict[str, torch.Tensor | None] = dict(zip(names, given.operands(0), strict=True))
    return kernel_for("lightning_indexer", tensors, {"k": picks, "scale": 1.0, "descriptor": FORM})


def check(where: str, picked: torch.Tensor, given: IndexerInputs, number: int, row: int) -> None:
    """NumericsError unless the row lists k different keys, ascending, and errs from the fp32 set by rounding alone."""
    one = slice(row, row + 1)
    q, weights, table = given.q[number, one], given.weights[number, one], given.tables[number, one]
    pages = given.pages[table[0].long()]
    local = torch.arange(len(pages), device="cuda", dtype=torch.int32).unsqueeze(0)
    picks = picked.shape[-1]
    wanted = lightning_indexer(q, pages, weights, given.lengths[one], k=picks, scale=1.0, block_table=local)[0, 0]
    found = picked[row, 0]
    if not bool((found[1:] > found[:-1]).all()) or int(found[0]) < 0 or int(found[-1]) >= int(given.lengths[row]):
        raise NumericsError(f"{where}: row {row} does not list {picks} keys in ascending order")
    odd = torch.cat([found[~torch.isin(found, wanted)], wanted[~torch.isin(wanted, found)]]).long()
    scores = scores_of(q, pages, weights)
    margin = RECALL_MARGIN * float(scores.abs().max())
    worst = float((scores[odd] - scores[wanted.long()].min()).abs().max()) if len(odd) else 0.0
    if worst > margin:
        raise NumericsError(f"{where}: row {row} misses a key by {worst:.3g} of score, more than {margin:.3g}")


def scores_of(q: torch.Tensor, pages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """fp32 scores of one row over its pages."""
    flat = pages.view(len(pages), -1)
    keys = flat[:, : PAGE * WIDTH].reshape(-1, WIDTH).view(torch.float8_e4m3fn).float()
    scales = flat[:, PAGE * WIDTH :].contiguous().view(torch.float32).flatten()
    return weights[0, 0] @ (q[0, 0].float() @ keys.T).relu() * scales


def gates(batch: int, length: int, picks: int) -> None:
    """Rows of ties at the timed shape: among equal scores the lower index wins, and every run gives the same.

    Raises NumericsError.
    """
    equal = inputs(batch, length, "equal", sets=1)
    picked = kernel_of(equal, picks).launch(*equal.operands(0))
    if not bool((picked == torch.arange(picks, device="cuda", dtype=torch.int32)).all()):
        raise NumericsError(f"indexer B {batch} L {length}: rows of one score do not list the first {picks} keys")
    half = inputs(batch, length, "half", sets=1)
    launch = kernel_of(half, picks).launch
    picked = launch(*half.operands(0))
    check(f"indexer B {batch} L {length}, half zeros", picked, half, 0, 0)
    if not torch.equal(picked, launch(*half.operands(0))):
        raise NumericsError(f"indexer B {batch} L {length}: two runs differ")


def point(batch: int, length: int, picks: int, peers: Sequence[str]) -> dict[str, Any]:
    """One shape: gates, then the time of a call on cold keys, of rows of one score, and of each peer."""
    where = f"indexer B {batch} L {length} k {picks}"
    gates(batch, length, picks)
    given = inputs(batch, length)
    count = len(given.q)
    kernel = kernel_of(given, picks)
    for number in (0, count - 1):
        picked = kernel.launch(*given.operands(number))
        for row in {0, batch - 1}:
            check(where, picked, given, number, row)
    time = time_in_graph([bound(kernel.launch, given.operands(number)) for number in range(count)])
    found: dict[str, Any] = {"batch": batch, "length": length, "k": picks, "ours": {"us": time.as_dict()}}
    found["ours"] |= {"route": kernel.CONSTANTS["route"], "nodes": graph_nodes(bound(kernel.launch, given.operands(0)))}
    floor = batch * length * KEY_BYTES / BYTES_AT_RATE
    found |= {"floor_us": round(floor, 2), "peers": {}}
    for name in (name for name in INDEXER_PEERS if name in peers):
        try:
            calls, record = adaptor(name).described(given, picks)
            other = time_in_graph(calls)
            found["peers"][name] = {"us": other.as_dict(), "ratio": round(other.median / time.median, 3), **record}
            found["peers"][name]["nodes"] = graph_nodes(calls[0])
        except PeerUnavailableError as reason:
            found["peers"][name] = {"unavailable": str(reason)}
    if (batch, length, picks) in TIED:
        found["ours"]["rows_of_one_score_us"] = ties(batch, length, picks).as_dict()
    return found


def ties(batch: int, length: int, picks: int) -> Timing:
    """The time of rows of one score, which no bin tells apart."""
    given = inputs(batch, length, "equal")
    launch = kernel_of(given, picks).launch
    return time_in_graph([bound(launch, given.operands(number)) for number in range(len(given.q))])


def bound(launch: Callable[..., Any], operands: tuple[torch.Tensor | None, ...]) -> Callable[[], Any]:
    """The launch on these operands."""
    return lambda: launch(*operands)
