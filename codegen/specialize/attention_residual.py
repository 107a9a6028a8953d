"""Shapes, strides and tiles of attention residuals in one pass."""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, is_hopper, needed, padded, render
from kimigraph.codegen.specialize.residual_sources import (
    ELEMENTS,
    MOST_HELD,
    MOST_SOURCES,
    early_options,
    is_aligned,
    row_stride,
    sources_of,
    starts_early,
    tiles,
    tokens_of,
    warps_for,
    weight_strides,
)

CLUSTERS = (  # tokens at most, sources at least, programs of a cluster, channels of a thread
    (4, 3, 8, 8),
    (32, 3, 4, 16),
    (66, 6, 2, 16),
)
EARLY_TOKENS = range(33, 67)  # where a launch that starts early was faster, from as many sources on:
EARLY_SOURCES = 3
CLUSTER_WIDTH = 256  # channels of a program: a warp's loads
FEW_TOKENS = 200
MANY_TOKENS = (  # sources at least, of a tile at most, channels of a thread, registers of one at most
    (6, 2, 32, 128),
    (3, 4, 32, None),
    (1, 2, 64, 168),
)
WEIGHTS = ("query", "norm_weight", "out_norm_weight")


def build(request: KernelRequest) -> KernelModule:
    """One program a token; CompileError for more sources than the kernel takes, or one whose rows are scattered."""
    sources = sources_of(request)
    tokens, width = tokens_of(sources[0]), sources[0].shape[-1]
    strides = tuple(row_stride(request, f"sources_{number}") for number in range(len(sources)))
    aligned = all(is_aligned(spec, stride) for spec, stride in zip(sources, strides, strict=True))
    shared: dict[str, Any] = {
        "D": width,
        "EPS": float(request.attributes["eps"]),
        "OUT_EPS": float(request.attributes["out_eps"]),
        "SOURCE_STRIDE": strides,
        "WEIGHT_STRIDE": weight_strides(request, WEIGHTS),
        "EARLY": starts_early(request) and tokens in EARLY_TOKENS and len(sources) >= EARLY_SOURCES,
    }
    operands: dict[str, TensorSpec | str | None] = {
        **{f"source_{number}": request.tensors.get(f"sources_{number}") for number in range(MOST_SOURCES)},
        "query": needed(request, "query"),
        "norm_weight": request.tensors.get("norm_weight"),
        "out_norm_weight": request.tensors.get("out_norm_weight"),
        "out": sources[0].dtype,
    }
    launch = {"out": sources[0].shape, "grid": (tokens,)}
    parts, elements = cluster(tokens, len(sources), width)
    if is_hopper(request.target) and aligned and parts > 1:
        return build_cluster(launch, operands, shared, (len(sources), parts, elements))
    most, few, options = schedule(tokens, len(sources), width)
    options |= early_options(shared["EARLY"])
    first, rows = tiles(len(sources), most)
    constants = {
        **shared,
        "ALIGNED": aligned,
        "FIRST": first,
        "ROWS": rows,
        "FEW": few,
        "BLOCK": padded(width),
        "INTERPRET": False,
    }
    text = render("attention_residual", {**launch, "mix": constants, "options": options})
    return KernelModule(text, (ahead_of_time("mix", operands, constants, options),))


def build_cluster(
    launch: dict[str, Any],
    operands: dict[str, TensorSpec | str | None],
    shared: dict[str, Any],
    form: tuple[int, int, int],
) -> KernelModule:
    """The form for a few tokens on Hopper: programs of a cluster share a token's channels.

    ``form``: how many sources there are, programs of a cluster, and channels of a thread.
    """
    sources, parts, elements = form
    chunk = 8 * ceil_div(shared["D"], 8 * parts)
    constants: dict[str, Any] = {
        **shared,
        "N": sources,
        "ROWS": padded(sources),
        "PARTS": parts,
        "CHUNK": chunk,
        "BLOCK": padded(chunk, 256),
        "EXCHANGE": exchange(parts),
        "WARPS": max(padded(chunk, 256) // elements // 32, 1),
    }
    options = {"num_warps": constants["WARPS"], "num_ctas": parts, **early_options(shared["EARLY"])}
    text = render("attention_residual_gluon", {**launch, "mix_cluster": constants, "options": options})
    return KernelModule(text, (ahead_of_time("mix_cluster", operands, constants, options),))


def cluster(tokens: int, sources: int, width: int) -> tuple[int, int]:
    """Programs that share a token, and channels of a thread: what was fastest on an H200; (1, 0) for no cluster."""
    for most, least, parts, elements in CLUSTERS:
        if tokens <= most and sources >= least and width >= CLUSTER_WIDTH * parts:
            return parts, elements
    return 1, 0


def exchange(parts: int) -> str:
    """PTX that sums two floats over ``parts`` programs of a cluster: each leaves its own in the memory of all.

    A program's first warp speaks for it. The memory is of this block alone, so a block is good for one exchange.
    """
    lines = [
        "{",
        ".reg .b32 base, own, there, rank; .reg .f32 a, b; .reg .pred speaks;",
        f".shared .align 8 .b8 sums[{parts * 256}];",
        "mov.u32 rank, %tid.x; setp.lt.u32 speaks, rank, 32;",
        "mov.u32 base, sums; shl.b32 own, $4, 3; add.u32 base, base, own;",
        "mov.u32 rank, %cluster_ctarank; shl.b32 rank, rank, 8; add.u32 own, base, rank;",
    ]
    for part in range(parts):
        lines.append(f"mapa.shared::cluster.u32 there, own, {part};")
        lines.append("@speaks st.shared::cluster.v2.f32 [there], {$2, $3};")
    lines.append("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")
    lines.append("mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000;")
    for part in range(parts):
        lines.append(f"ld.shared.v2.f32 {{a, b}}, [base+{part * 256}]; add.f32 $0, $0, a; add.f32 $1, $1, b;")
    return "\n".join([*lines, "}"])


def schedule(tokens: int, sources: int, width: int) -> tuple[int, bool, dict[str, Any]]:
    """Sources of a tile at most, whether weights are held too, and Triton's options: what was fastest on an H200.

    Of a few tokens everything is in flight at once. Of many, programs that need few registers follow one another.
    """
    if tokens <= FEW_TOKENS:
        warps = warps_for(width)
        held = -(-padded(width) // (32 * warps))
        most = 1 << (max(MOST_HELD // max(held, ELEMENTS), 1).bit_length() - 1)
        return most, True, {"num_warps": warps, "num_stages": 1}
    _, most, elements, registers = next(row for row in MANY_TOKENS if sources >= row[0])
    options = {"num_warps": warps_for(width, elements), "num_stages": 1}
    return most, False, options | ({} if registers is None else {"maxnreg": registers})
