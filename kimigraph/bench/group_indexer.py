"""``kimigraph bench li-mxfp8``: the indexer over MXFP8 pages against the one over keys of one scale each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from types import ModuleType
from typing import Any

import torch

from kimigraph.bench import indexer_prefill as prompts
from kimigraph.bench import lightning_indexer as plain
from kimigraph.bench.graph_nodes import graph_nodes
from kimigraph.bench.kda import machine
from kimigraph.bench.kernels import kernel_for
from kimigraph.bench.lightning_indexer import FILL, HEADS, KEY_BYTES, PAGE, WIDTH, bound
from kimigraph.bench.protocol import require_gpu, sets_for_cold_cache, time_in_graph
from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.reference.cache_bytes import read_index_keys
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_dequantize

GROUP = 32
POINTS = tuple((batch, length) for batch in (1, 8, 64) for length in (8192, 32768, 131072))
PICKS = 2048
FORM = str(IndexKeyDescriptor("paged", "float8_e4m3fn", WIDTH, page_size=PAGE, scales="e8m0", group=GROUP))
NAMES = ("q", "keys", "weights", "lengths", "mask", "block_table", "q_scales")
MARGIN = 1e-4  # of the largest score: what bf16 products of exact operands, summed in fp32, may differ by
Operands = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class GroupInputs:
    """``sets`` of operands over one pool of pages, no page in two of them."""

    q: torch.Tensor
    q_scales: torch.Tensor
    weights: torch.Tensor
    pages: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor

    def operands(self, number: int) -> Operands:
        """One call's operands in schema order."""
        some = self.q[number], self.pages, self.weights[number], self.lengths, None, self.tables[number]
        return *some, self.q_scales[number]


def inputs(batch: int, length: int, sets: int | None = None) -> GroupInputs:
    """Random codes under random powers of two."""
    count = sets_for_cold_cache(batch * length * KEY_BYTES) if sets is None else sets
    number = count * batch * length // PAGE
    pages = torch.empty(number, PAGE * KEY_BYTES, dtype=torch.uint8, device="cuda")
    for start in range(0, number, FILL):
        some = pages[start : start + FILL]
        some[:, : PAGE * WIDTH] = codes(len(some), PAGE * WIDTH)
        some[:, PAGE * WIDTH :] = exponents(len(some), PAGE * WIDTH // GROUP)
    shape = (count, batch, 1, HEADS)
    q, scales = codes(*shape, WIDTH), exponents(*shape, WIDTH // GROUP)
    weights = torch.randn(shape, device="cuda")
    tables = torch.randperm(number, device="cuda").to(torch.int32).view(count, batch, -1)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    return GroupInputs(q, scales, weights, pages.view(number, PAGE, KEY_BYTES), tables, lengths)


def codes(*shape: int) -> torch.Tensor:
    """Bytes of Gaussian E4M3."""
    return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)


def exponents(*shape: int) -> torch.Tensor:
    """Bytes of E8M0 near 2 ** -5."""
    return torch.randint(118, 126, shape, device="cuda", dtype=torch.uint8)


def kernel_of(operands: Operands) -> ModuleType:
    """The kernel that the compiler writes for these operands."""
    return kernel_for(
        "lightning_indexer",
        dict(zip(NAMES, operands, strict=True)),
        {"k": PICKS, "scale": 1.0, "descriptor": FORM},
    )


def check(where: str, picked: torch.Tensor, given: GroupInputs, number: int, row: int) -> None:
    """NumericsError unless the row lists k different keys, ascending, and errs from the fp32 set by rounding alone."""
    found, length = picked[row, 0].long(), int(given.lengths[row])
    if not bool((found[1:] > found[:-1]).all()) or int(found[0]) < 0 or int(found[-1]) >= length:
        raise NumericsError(f"{where}: row {row} does not list {PICKS} keys in ascending order")
    pages = given.pages[given.tables[number, row].long()]
    keys = read_index_keys(pages, FORM).view(-1, WIDTH)
    q = mxfp8_dequantize(given.q[number, row, 0], given.q_scales[number, row, 0], group=GROUP)
    scores = given.weights[number, row, 0] @ (q @ keys.T).relu()
    left = torch.ones(length, dtype=torch.bool, device=found.device)
    left[found] = False
    margin = MARGIN * float(scores.abs().max())
    if float(scores[:length][left].max() - scores[found].min()) > margin:
        raise NumericsError(f"{where}: row {row} leaves out a key by more than {margin:.3g} of score")


def point(batch: int, length: int) -> dict[str, Any]:
    """One shape: picks checked, then the time of a call on cold keys in either format."""
    given = inputs(batch, length)
    count = len(given.q)
    kernel = kernel_of(given.operands(0))
    for number, row in {(0, 0), (count - 1, batch - 1)}:
        picked = kernel.launch(*given.operands(number))
        check(f"MXFP8 indexer B {batch} L {length}", picked, given, number, row)
    time = time_in_graph([bound(kernel.launch, given.operands(number)) for number in range(count)])
    other = plain.inputs(batch, length)
    launch = plain.kernel_of(other, PICKS).launch
    one_scale = time_in_graph([bound(launch, other.operands(number)) for number in range(len(other.q))])
    return {
        "batch": batch,
        "length": length,
        "k": PICKS,
        "ours": {"us": time.as_dict(), "route": kernel.CONSTANTS["route"]},
        "nodes": graph_nodes(bound(kernel.launch, given.operands(0))),
        "one_scale_a_key": one_scale.as_dict(),
        "times_one_scale": round(time.median / one_scale.median, 3),
    }


def prompt_point(length: int) -> dict[str, Any]:
    """The last 8192 rows of a prompt of ``length`` tokens, in either format; rows of the first are checked."""
    given, rows = inputs(1, length, sets=1), prompts.ROWS
    q, scales = codes(1, rows, HEADS, WIDTH), exponents(1, rows, HEADS, WIDTH // GROUP)
    weights = torch.randn(1, rows, HEADS, device="cuda")
    first = torch.tensor([length - rows + 1], dtype=torch.int32, device="cuda")
    operands: Operands = (q, given.pages, weights, first, None, given.tables[0], scales)
    kernel = kernel_of(operands)
    picked = kernel.launch(*operands)
    for row in (rows // 2, rows - 1):
        own, powers, heads = (part[:, row].view(1, 1, 1, *part.shape[2:]) for part in (q, scales, weights))
        one = GroupInputs(own, powers, heads, given.pages, given.tables, first + row)
        check(f"MXFP8 indexer, row {row} of L {length}", picked[:, row : row + 1], one, 0, 0)
    time = time_in_graph([bound(kernel.launch, operands)], at_least=prompts.CALLS, replays=prompts.REPLAYS)
    other = prompts.inputs(length)
    launch = prompts.kernel_of(other).launch
    one_scale = time_in_graph([bound(launch, other.operands())], at_least=prompts.CALLS, replays=prompts.REPLAYS)
    return {
        "rows": rows,
        "length": length,
        "k": PICKS,
        "ours": {"us": time.as_dict(), "route": kernel.CONSTANTS["route"]},
        "one_scale_a_key": one_scale.as_dict(),
        "times_one_scale": round(time.median / one_scale.median, 3),
    }


def run(say: Callable[[str], None], points: Sequence[tuple[int, int]] = POINTS) -> dict[str, Any]:
    """All points. The document for ``--json``.

    Raises UsageError without a GPU and NumericsError when our result is wrong at a point.
    """
    require_gpu()
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": machine(), "points": []}
    for shape in points:
        document["points"].append(point(*shape))
        say(line(document["points"][-1]))
    for length in prompts.POINTS:
        document.setdefault("prefill", []).append(prompt_point(length))
        say(line({**document["prefill"][-1], "batch": 1}))
    ratios = [one["times_one_scale"] for one in document["points"]]
    document["times_one_scale"] = {"geometric_mean": round(geometric_mean(ratios), 3), "worst": max(ratios)}
    say(f"of the time of one scale a key: geometric mean {geometric_mean(ratios):.3f}, worst {max(ratios):.3f}")
    return document


def line(record: dict[str, Any]) -> str:
    """A point for people."""
    us, other = record["ours"]["us"]["median"], record["one_scale_a_key"]["median"]
    rows = f" {record['rows']} rows" if "rows" in record else ""
    shape = f"B {record['batch']}{rows} L {record['length']} k {record['k']}"
    ratio = record["times_one_scale"]
    return f"{shape}: {us:.2f} us, one scale a key {other:.2f} us, {ratio:.2f} times, {record['ours']['route']}"
