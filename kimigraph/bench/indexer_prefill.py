"""Prefill points of ``kimigraph bench li``: 8192 query rows at the end of a context, fp8 pages; correctness first."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from kimigraph.bench.graph_nodes import graph_nodes
from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.lightning_indexer import FORM, HEADS, KEY_BYTES, PAGE, RECALL_MARGIN, WIDTH
from kimigraph.bench.peers import PREFILL_INDEXER_PEERS, PeerUnavailableError, adaptor
from kimigraph.bench.protocol import time_in_graph
from kimigraph.ir.errors import NumericsError

ROWS, PICKS = 8192, 2048
POINTS = (8192, 32768, 131072)
FP8_FLOPS_AT_RATE = 1.58e9  # a microsecond, of a large product
CHECKED = (0, 1, 2047, 2048, 5000, 8191)
CALLS, REPLAYS = 2, 5


@dataclass(frozen=True)
class PromptInputs:
    """One sequence's prompt rows, the last of ``lengths`` + rows - 1 positions, over shuffled pages."""

    q: torch.Tensor
    weights: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    def operands(self) -> tuple[torch.Tensor | None, ...]:
        """In schema order."""
        return self.q, self.pages, self.weights, self.lengths, None, self.table

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys e4m3 [L, 128] and their scales [L], in the order of positions."""
        flat = self.pages.view(len(self.pages), -1)[self.table[0].long()]
        keys = flat[:, : PAGE * WIDTH].reshape(-1, WIDTH).view(torch.float8_e4m3fn)
        return keys.contiguous(), flat[:, PAGE * WIDTH :].contiguous().view(torch.float32).flatten()


def inputs(length: int, kind: str = "gaussian", rows: int = ROWS) -> PromptInputs:
    """Random queries and keys; "equal" keys make rows of one score."""
    number = length // PAGE
    pages = torch.empty(number, PAGE * KEY_BYTES, dtype=torch.uint8, device="cuda")
    values = torch.randn(number, PAGE * WIDTH, device="cuda")
    scales = torch.rand(number, PAGE, device="cuda") * 0.02 + 0.01
    if kind == "equal":
        values, scales = torch.ones_like(values), torch.ones_like(scales)
    pages[:, : PAGE * WIDTH] = values.to(torch.float8_e4m3fn).view(torch.uint8)
    pages[:, PAGE * WIDTH :] = scales.view(torch.uint8)
    q = torch.randn(1, rows, HEADS, WIDTH, device="cuda").to(torch.float8_e4m3fn)
    weights = torch.randn(1, rows, HEADS, device="cuda")
    table = torch.randperm(number, device="cuda").to(torch.int32).view(1, -1)
    lengths = torch.tensor([length - rows + 1], dtype=torch.int32, device="cuda")
    return PromptInputs(q, weights, pages.view(number, PAGE, KEY_BYTES), table, lengths)


def kernel_of(given: PromptInputs) -> ModuleType:
    """The kernel that the compiler writes for these operands."""
    names = ("q", "keys", "weights", "lengths", "mask", "block_table")
    tensors: dict[str, torch.Tensor | None] = dict(zip(names, given.operands(), strict=True))
    return kernel_for("lightning_indexer", tensors, {"k": PICKS, "scale": 1.0, "descriptor": FORM})


def check(where: str, picked: torch.Tensor, given: PromptInputs) -> None:
    """NumericsError unless rows list their keys, ascending, and err from the fp32 set by rounding alone."""
    keys, scales = given.contiguous()
    for row in CHECKED:
        limit = int(given.lengths[0]) + row
        count = min(PICKS, limit)
        found = picked[0, row]
        ordered = bool((found[1:count] > found[: count - 1]).all()) and bool((found[count:] == -1).all())
        if not ordered or int(found[0]) < 0 or int(found[count - 1]) >= limit:
            raise NumericsError(f"{where}: row {row} does not list {count} keys in ascending order")
        scores = given.weights[0, row] @ (given.q[0, row].float() @ keys[:limit].float().T).relu() * scales[:limit]
        missed = float(torch.topk(scores, count).values[-1] - scores[found[:count].long()].min())
        margin = RECALL_MARGIN * float(scores.abs().max())
        if missed > margin:
            raise NumericsError(f"{where}: row {row} misses a key by {missed:.3g} of score, more than {margin:.3g}")


def point(length: int, peers: Sequence[str]) -> dict[str, Any]:
    """One context: gates, our time and memory, each peer's."""
    where = f"indexer prefill L {length}"
    equal = inputs(length, "equal")
    picked = kernel_of(equal).launch(*equal.operands())[0, -1]
    if not bool((picked == torch.arange(PICKS, device="cuda", dtype=torch.int32)).all()):
        raise NumericsError(f"{where}: rows of one score do not list the first {PICKS} keys")
    given = inputs(length)
    kernel = kernel_of(given)
    operands = given.operands()
    check(where, kernel.launch(*operands), given)
    time = time_in_graph([lambda: kernel.launch(*operands)], at_least=CALLS, replays=REPLAYS)
    pairs = sum(min(int(given.lengths[0]) + row, length) for row in range(ROWS))
    floor = pairs * HEADS * WIDTH * 2 / FP8_FLOPS_AT_RATE
    found: dict[str, Any] = {"rows": ROWS, "length": length, "k": PICKS, "floor_us": round(floor, 2), "peers": {}}
    found["ours"] = {
        "us": time.as_dict(),
        "route": kernel.CONSTANTS["route"],
        "memory_mib": memory_of(lambda: kernel.launch(*operands)),
        "nodes": graph_nodes(lambda: kernel.launch(*operands)),
    }
    for name in (name for name in PREFILL_INDEXER_PEERS if name in peers):
        try:
            call, _ = adaptor(name).prefill(given, PICKS)
            other = time_in_graph([call], at_least=CALLS, replays=REPLAYS)
            entry = {"us": other.as_dict(), "ratio": round(other.median / time.median, 3)}
            found["peers"][name] = {**entry, "memory_mib": memory_of(call), "nodes": graph_nodes(call)}
        except PeerUnavailableError as reason:
            found["peers"][name] = {"unavailable": str(reason)}
    return found


def memory_of(call: Any) -> float:
    """What a call allocates at most, in MiB, its result included."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
