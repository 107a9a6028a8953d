"""Shapes, strides and tiles of attention residuals in two phases."""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, needed, padded, refuse, render
from kimigraph.codegen.specialize.residual_sources import (
    MOST_SOURCES,
    early_options,
    is_aligned,
    row_stride,
    sources_of,
    starts_early,
    tokens_of,
    warps_for,
    weight_strides,
)

MOST_QUERIES = 8  # pointers that a kernel takes
PROGRAMS = 132  # up to as many, a query has a program of its own; more programs take two queries each
WEIGHTS = ("query", "norm_weight", "out_norm_weight")


def build_history(request: KernelRequest) -> KernelModule:
    """A program for each token and, of few tokens, each query; CompileError for more operands than it takes."""
    sources = sources_of(request)
    queries = [name for name in request.tensors if name.startswith("queries_")]
    norms = [name for name in request.tensors if name.startswith("norm_weights_")]
    if len(queries) > MOST_QUERIES:
        raise refuse(request, f"{len(queries)} queries", f"the kernel takes at most {MOST_QUERIES} at a time")
    tokens, width, count = tokens_of(sources[0]), sources[0].shape[-1], len(queries)
    strides = tuple(row_stride(request, f"sources_{number}") for number in range(len(sources)))
    rows = padded(len(sources))
    each = queries_each(tokens, count)
    early = starts_early(request)
    options = {"num_warps": warps_for(width), "num_stages": 1, **early_options(early)}
    constants: dict[str, Any] = {
        "T": tokens,
        "D": width,
        "N": len(sources),
        "Q": count,
        "EACH": each,
        "NORMED": bool(norms),
        "EARLY": early,
        "EPS": float(request.attributes["eps"]),
        "SOURCE_STRIDE": strides,
        "ALIGNED": all(is_aligned(spec, stride) for spec, stride in zip(sources, strides, strict=True)),
        "QUERY_STRIDE": weight_strides(request, queries),
        "NORM_STRIDE": weight_strides(request, norms),
        "ROWS": rows,
        "BLOCK": padded(width),
        "INTERPRET": False,
    }
    shape = (count, *sources[0].shape)
    launch = {"mixture": shape, "lse": shape[:-1], "grid": (tokens, ceil_div(count, each))}
    text = render("attention_residual_history", {**launch, "mix_history": constants, "options": options})
    operands: dict[str, TensorSpec | str | None] = {
        **{f"source_{number}": request.tensors.get(f"sources_{number}") for number in range(MOST_SOURCES)},
        **{f"query_{number}": request.tensors.get(f"queries_{number}") for number in range(MOST_QUERIES)},
        **{f"norm_weight_{number}": request.tensors.get(f"norm_weights_{number}") for number in range(MOST_QUERIES)},
        "mixture": "float32",
        "lse": "float32",
    }
    return KernelModule(text, (ahead_of_time("mix_history", operands, constants, options),))


def queries_each(tokens: int, count: int) -> int:
    """Queries of a program: one after the other is slow, and apart each reads the sources anew."""
    return 1 if tokens * count <= PROGRAMS else min(count, 2)


def build_merge(request: KernelRequest) -> KernelModule:
    """One program a token."""
    history, lse, partial = (needed(request, name) for name in ("history", "lse", "partial"))
    width = partial.shape[-1]
    lse_rows = TensorSpec((*lse.shape, 1), (*lse.stride, 1), lse.dtype)
    lse_stride = row_stride(KernelRequest(request.op, {"lse": lse_rows}, {}), "lse")
    early = starts_early(request)
    options = {"num_warps": warps_for(width), "num_stages": 1, **early_options(early)}
    constants: dict[str, Any] = {
        "D": width,
        "EPS": float(request.attributes["eps"]),
        "OUT_EPS": float(request.attributes["out_eps"]),
        "STRIDE": (row_stride(request, "history"), lse_stride, row_stride(request, "partial")),
        "WEIGHT_STRIDE": weight_strides(request, WEIGHTS),
        "EARLY": early,
        "BLOCK": padded(width),
        "INTERPRET": False,
    }
    text = render(
        "attention_residual_merge",
        {"out": partial.shape, "grid": (tokens_of(partial),), "merge": constants, "options": options},
    )
    operands: dict[str, TensorSpec | str | None] = {
        "history": history,
        "lse": lse,
        "partial": partial,
        "query": needed(request, "query"),
        "norm_weight": request.tensors.get("norm_weight"),
        "out_norm_weight": request.tensors.get("out_norm_weight"),
        "out": partial.dtype,
    }
    return KernelModule(text, (ahead_of_time("merge", operands, constants, options),))
