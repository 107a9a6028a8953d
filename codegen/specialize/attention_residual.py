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

CLUSTERS = (  # tokens at most, sources at least, programs of a cluster, channels of a thread, may it start early
    (4, 5, 8, 8, True),
    (4, 3, 4, 16, True),
    (16, 5, 4, 16, False),
    (66, 6, 2, 16, True),
)
PAIRS = (  # of two sources that are normalised: tokens at most, and the rest as above
    (8, 4, 16, True),
    (32, 4, 16, False),
    (200, 1, 8, True),
)
EARLY_TOKENS = 66  # to which a program that has a token to itself was faster when it starts early,
EARLY_SOURCES = 3  # from as many sources on
CLUSTER_WIDTH = 256  # channels of a program: a warp's loads
FEW_TOKENS = 200
MANY_TOKENS = (  # sources at least, of a tile at most, channels of a thread, registers of one at most
    (6, 2, 32, 128),
    (3, 4, 32, None),
    (1, 2, 64, 168),
)
LEAST_BLOCK = 16
ABSENT_OF_PAIR = frozenset(f"source_{number}" for number in range(2, MOST_SOURCES))
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
    }
    operands: dict[str, TensorSpec | str | None] = {
        **{f"source_{number}": request.tensors.get(f"sources_{number}") for number in range(MOST_SOURCES)},
        "query": needed(request, "query"),
        "norm_weight": request.tensors.get("norm_weight"),
        "out_norm_weight": request.tensors.get("out_norm_weight"),
        "out": sources[0].dtype,
    }
    launch = {"out": sources[0].shape, "grid": (tokens,)}
    pair = len(sources) == 2 and operands["out_norm_weight"] is not None and narrow(sources)
    parts, elements, early = form(tokens, len(sources), width, pair=pair)
    shared["EARLY"] = starts_early(request) and early
    if is_hopper(request.target) and aligned and parts > 1:
        return build_cluster(launch, operands, {**shared, "PAIR": pair}, (len(sources), parts, elements))
    if pair and parts > 0:
        return build_pair(launch, operands, {**shared, "ALIGNED": aligned}, warps_for(width, elements))
    most, few, options = schedule(tokens, len(sources), width)
    options |= early_options(shared["EARLY"])
    first, rows = tiles(len(sources), most)
    constants = {
        **shared,
        "ALIGNED": aligned,
        "FIRST": first,
        "ROWS": rows,
        "FEW": few,
        "BLOCK": padded(width, LEAST_BLOCK),
        "INTERPRET": False,
    }
    text = render("attention_residual", {**launch, "mix": constants, "options": options})
    return KernelModule(text, (ahead_of_time("mix", operands, constants, options),))


def narrow(sources: list[TensorSpec]) -> bool:
    """Whether all sources are of 16 bits, whose rounding exceeds that of products of sources."""
    return all(source.dtype in ("bfloat16", "float16") for source in sources)


def build_pair(
    launch: dict[str, Any], operands: dict[str, TensorSpec | str | None], shared: dict[str, Any], warps: int
) -> KernelModule:
    """The form of two sources: one reduction instead of two."""
    constants = {**shared, "BLOCK": padded(shared["D"], LEAST_BLOCK), "INTERPRET": False}
    options = {"num_warps": warps, "num_stages": 1, **early_options(shared["EARLY"])}
    text = render("attention_residual_pair", {**launch, "mix_pair": constants, "options": options})
    given = {name: spec for name, spec in operands.items() if name not in ABSENT_OF_PAIR}
    return KernelModule(text, (ahead_of_time("mix_pair", given, constants, options),))


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
        "EXCHANGE": exchange(parts, 3 if shared["PAIR"] else 2),
        "WARPS": max(padded(chunk, 256) // elements // 32, 1),
    }
    options = {"num_warps": constants["WARPS"], "num_ctas": parts, **early_options(shared["EARLY"])}
    text = render("attention_residual_gluon", {**launch, "mix_cluster": constants, "options": options})
    return KernelModule(text, (ahead_of_time("mix_cluster", operands, constants, options),))


def form(tokens: int, sources: int, width: int, *, pair: bool) -> tuple[int, int, bool]:
    """Programs that share a token, channels of a thread, whether a launch starts early: what was fastest on an H200.

    ``pair``: two sources whose mixture is normalised. No programs: the form in tiles of sources.
    """
    if pair:
        for most, parts, elements, early in PAIRS:
            if tokens <= most and width >= CLUSTER_WIDTH * parts:
                return parts, elements, early
        return 0, 0, False
    for most, least, parts, elements, early in CLUSTERS:
        if tokens <= most and sources >= least and width >= CLUSTER_WIDTH * parts:
            return parts, elements, early
    return 0, 0, tokens <= EARLY_TOKENS and sources >= EARLY_SOURCES


def exchange(parts: int, values: int = 2) -> str:
    """PTX that sums two or three floats over ``parts`` programs of a cluster: each leaves its own in the memory of all.

    A program's first warp speaks for it. The memory is of this block alone, so a block is good for one exchange.
    """
    width = 2 if values == 2 else 4  # floats of a vector access
    size = 128 * width  # bytes of a warp's
    sums, own = [f"${number}" for number in range(values)], [f"${values + number}" for number in range(values)]
    taken = ["a", "b", "c", "d"][:width]
    lines = [
        "{",
        ".reg .b32 base, own, there, rank; .reg .f32 a, b, c, d; .reg .pred speaks;",
        f".shared .align {4 * width} .b8 sums[{parts * size}];",
        "mov.u32 rank, %tid.x; setp.lt.u32 speaks, rank, 32;",
        f"mov.u32 base, sums; shl.b32 own, ${2 * values}, {width.bit_length() + 1}; add.u32 base, base, own;",
        f"mov.u32 rank, %cluster_ctarank; shl.b32 rank, rank, {size.bit_length() - 1}; add.u32 own, base, rank;",
    ]
    for part in range(parts):
        lines.append(f"mapa.shared::cluster.u32 there, own, {part};")
        lines.append(f"@speaks st.shared::cluster.v{width}.f32 [there], {{{', '.join((own * 2)[:width])}}};")
    lines.append("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")
    lines.extend(f"mov.f32 {total}, 0f00000000;" for total in sums)
    for part in range(parts):
        lines.append(f"ld.shared.v{width}.f32 {{{', '.join(taken)}}}, [base+{part * size}];")
        lines.extend(f"add.f32 {total}, {total}, {value};" for total, value in zip(sums, taken, strict=False))
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
