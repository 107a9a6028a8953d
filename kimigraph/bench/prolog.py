"""``kimigraph bench prolog``: products of the same rows, merged as the compiler merges them, against separate calls;
and the input preparation of an indexer, split or merged, against the same kernels one after the other."""

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule

from kimigraph.bench import indexer_prolog
from kimigraph.bench.kda import machine
from kimigraph.bench.protocol import relative_error, require_gpu, sets_for_cold_cache, time_in_graph
from kimigraph.codegen.regions import BUILDERS
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.row_products import MOST_ROWS

GROUPS: dict[str, tuple[int, tuple[int, ...], int]] = {
    "DSA layer of K3.1: q_a, kv_a, g, wk; weights_proj in fp32": (2304, (1536, 576, 4096, 128), 64),
    "DSA prolog at hidden size 7168: q_a, kv_a, wk; weights_proj in fp32": (7168, (1536, 576, 128), 64),
    "KDA layer of K3.1: q, k, v, g, f_a, b": (2304, (4096, 4096, 4096, 4096, 128, 32), 0),
    "MoE layer of K3.1: latent down, shared gate and up; router in fp32": (2304, (1152, 1024, 1024), 256),
}
"""Depth, columns of the 16-bit weights, columns of the fp32 weight (0: none)."""

BATCHES = (1, 2, 8, 64)
PARTS = ("products", "indexer")
TOLERANCE = 1e-2


def run(say: Callable[[str], None], parts: Sequence[str] = PARTS) -> dict[str, Any]:
    """All groups and batches of these parts: the document for ``--json``.

    Raises UsageError without a GPU and NumericsError when a merged result is wrong.
    """
    require_gpu()
    torch.manual_seed(0)
    document: dict[str, Any] = {"machine": machine(), "prolog": []}
    rate = document["machine"]["copy_tb_per_s"]
    for name, (depth, columns, wide) in GROUPS.items() if "products" in parts else ():
        for batch in BATCHES:
            document["prolog"].append({"group": name, **point(batch, depth, columns, wide, rate)})
            say(line(document["prolog"][-1]))
    document["indexer prolog"] = []
    for batch in indexer_prolog.BATCHES if "indexer" in parts else ():
        document["indexer prolog"].append(indexer_prolog.point(batch))
        say(indexer_prolog.line(document["indexer prolog"][-1]))
    return document


def point(batch: int, depth: int, columns: tuple[int, ...], wide: int, rate: float) -> dict[str, Any]:
    """One group of weights at one batch: separate calls, one product for the 16-bit ones, and one kernel for all."""
    nbytes = 2 * sum(columns) * depth + 4 * wide * depth
    weights = [_weight(sum(columns), depth, torch.bfloat16) for _ in range(sets_for_cold_cache(nbytes))]
    wides = [_weight(wide, depth, torch.float32) if wide else None for _ in weights]
    parts = [[part.clone() for part in weight.split(columns)] for weight in weights]
    x = torch.randn(batch, 1, depth, device="cuda", dtype=torch.bfloat16)

    def separate(number: int) -> list[torch.Tensor]:
        return [F.linear(x, part) for part in parts[number]] + _wide_product(x, wides[number])

    def side_by_side(number: int) -> list[torch.Tensor]:
        return [F.linear(x, weights[number]), *_wide_product(x, wides[number])]

    given = [tensor for tensor in (weights[0], wides[0]) if tensor is not None]
    one = _kernel(x, given) if batch <= MOST_ROWS else None

    def one_kernel(number: int) -> Any:
        assert one is not None
        return one(x, *(tensor for tensor in (weights[number], wides[number]) if tensor is not None))

    forms: dict[str, Callable[[int], Any]] = {"separate": separate, "side by side": side_by_side}
    if one is not None:
        forms["one kernel"] = one_kernel
    for form in list(forms)[1:]:
        _check(form, forms[form](0), x, given)
    times = {form: time_in_graph([partial(call, n) for n in range(len(weights))]) for form, call in forms.items()}
    # What the compiler makes: one kernel where types differ, else one product of the library.
    chosen = "one kernel" if wide and one is not None else "side by side"
    return {
        "batch": batch,
        "compiled as": chosen,
        "ratio": round(times["separate"].median / times[chosen].median, 3),
        "floor_us": round(nbytes / rate / 1e6, 2),
        "us": {form: time.as_dict() for form, time in times.items()},
    }


def line(row: dict[str, Any]) -> str:
    """One point for people."""
    times = ", ".join(f"{form} {time['median']:.2f}" for form, time in row["us"].items())
    return f"B {row['batch']:3} {row['group']}: {times} us, floor {row['floor_us']:.2f}; ratio {row['ratio']:.2f}"


def _weight(columns: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(columns, depth, device="cuda") * depth**-0.5).to(dtype)


def _wide_product(x: torch.Tensor, weight: torch.Tensor | None) -> list[torch.Tensor]:
    return [] if weight is None else [F.linear(x.float(), weight)]


def _kernel(x: torch.Tensor, weights: list[torch.Tensor]) -> Callable[..., Any]:
    """The launch of the kernel that the compiler writes for the region of these products."""
    path = Path(tempfile.mkdtemp(prefix="kimigraph-bench-")) / "products.py"
    path.write_text(BUILDERS["horizontal"](_region(x, weights)).text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}.products", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.launch


def _region(x: torch.Tensor, weights: list[torch.Tensor]) -> GraphModule:
    aten, graph = torch.ops.aten, Graph()
    rows = graph.placeholder("x")
    rows.meta["val"] = x
    results = []
    for number, weight in enumerate(weights):
        operand, left = graph.placeholder(f"weight_{number}"), rows
        operand.meta["val"] = weight
        if weight.dtype != x.dtype:
            left = graph.call_function(aten.to.dtype, (rows, weight.dtype))
            left.meta["val"] = x.to(weight.dtype)
        product = graph.call_function(aten.linear.default, (left, operand))
        product.meta["val"] = F.linear(left.meta["val"], weight)
        results.append(product)
    graph.output(tuple(results))
    return GraphModule(torch.nn.Module(), graph)


def _check(form: str, found: Any, x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for value, weight in zip(found, weights, strict=True):
        error = relative_error(value, x.double() @ weight.double().t())
        if not error <= (TOLERANCE if weight.dtype == torch.bfloat16 else 1e-5):
            raise NumericsError(f"bench prolog, {form}: {list(weight.shape)} {weight.dtype} is off by {error:.1e}")
