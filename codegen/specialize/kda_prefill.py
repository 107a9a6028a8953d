"""Shapes, strides, chunks and tiles of the gated delta rule over runs of tokens."""

from typing import Any

from kimigraph.codegen.kernel import KernelLaunch, KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.kda_strides import per_channel, per_head
from kimigraph.codegen.specialize.rendering import (
    ahead_of_time,
    ceil_div,
    is_hopper,
    needed,
    padded,
    refuse,
    render,
)

CHUNK = 32
SAFE_LOG_DECAY = 160.0  # of a whole chunk: half of it keeps a factor and its inverse inside fp32
MOST_STATE = 128 * 256  # fp32 state elements of one program, and as many of a chunk's tile
HOPPER_SIDE = 128
SEQUENCES_AT_ONCE = 4096  # entries of cu_seqlens that a program looks through in one load
SHARED_TILE = "NVMMASharedLayout(swizzle_byte_width={}, element_bitwidth=16, rank=2)"


def build(request: KernelRequest, *, deltas: bool = False) -> KernelModule:
    """The two launches; ``deltas`` asks for a compiled form that also writes every corrected delta u.

    CompileError for heads that exceed a program.
    """
    names = ("q", "k", "v", "g", "beta")
    q, k, v, g, beta = (needed(request, name) for name in names)
    initial, rate, bias, offsets = (
        request.tensors.get(name) for name in ("initial_state", "a_log", "dt_bias", "cu_seqlens")
    )
    attributes = request.attributes
    batch, tokens, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    block_k, block_v = padded(key_dim, 16), padded(value_dim, 16)
    if max(block_k, block_v) > 256:
        raise refuse(request, f"heads of {key_dim} and {value_dim} channels exceed a program", "at most 256 fit")
    sequences = batch if offsets is None else offsets.shape[0] - 1
    if sequences > SEQUENCES_AT_ONCE and offsets is not None:
        raise refuse(request, f"{sequences} packed sequences", f"at most {SEQUENCES_AT_ONCE} in one call")
    lower_bound = attributes.get("lower_bound")
    bounded = lower_bound is not None and -float(lower_bound) * CHUNK <= SAFE_LOG_DECAY
    narrow = {spec.dtype for spec in (q, k, v)} == {"bfloat16"}
    scratch = "bfloat16" if narrow else "float32"
    fast = narrow and key_dim == value_dim == HOPPER_SIDE and batch * tokens > 0 and is_hopper(request.target)
    if request.target.startswith("cuda") and not fast:
        raise refuse(
            request,
            "kda_prefill has no kernel yet for these operands on a GPU (it takes bf16 heads of 128 channels on Hopper)",
            "compile prefill with --target cpu:reference, or with -O0 --no-marks",
        )
    paired = fast and bounded and all(copies_in_16_bytes(spec) for spec in (q, k, v, g) if spec.dtype == "bfloat16")
    align = 2 if paired else 1
    chunks = ceil_div(tokens, CHUNK * align) * align
    # A packed sequence may begin and end inside a chunk, so each can cost one slot (or pair of slots) more.
    slots = batch * chunks if offsets is None else (tokens // (CHUNK * align) + sequences) * align
    common: dict[str, Any] = {"T": tokens, "H": heads, "K": key_dim, "V": value_dim, "C": CHUNK, "CHUNKS": chunks}
    prepare: dict[str, Any] = {
        **common,
        "SEQUENCES": sequences,
        "SCALE": float(attributes["scale"]),
        "L2_NORM": bool(attributes["l2_norm"]),
        "L2_EPS": float(attributes["l2_eps"]),
        "LOWER_BOUND": None if lower_bound is None else float(lower_bound),
        "BOUNDED": bounded,
        "Q_STRIDE": q.stride,
        "K_STRIDE": k.stride,
        "V_STRIDE": v.stride,
        "G_STRIDE": g.stride,
        "BETA_STRIDE": beta.stride,
        "RATE_STRIDE": 0 if rate is None else per_head(request, rate),
        "BIAS_STRIDE": (0, 0) if bias is None else per_channel(request, bias, heads, key_dim),
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "BLOCK_N": padded(sequences),
        "INTERPRET": False,
    }
    common["ALIGN"] = align
    first_name = "prepare_chunks"
    prepare_options = {"num_warps": 4 if narrow and block_k * block_v <= 128 * 128 else 8, "num_stages": 1}
    if paired:
        first_name = "prepare_chunk_pairs"
        absent = ("K", "V", "C", "BOUNDED", "BLOCK_K", "BLOCK_V", "INTERPRET")
        prepare = {name: value for name, value in prepare.items() if name not in absent}
        prepare["GATE_IN_TILE"] = g.dtype == "bfloat16"
        prepare_options = {"num_warps": 4, "maxnreg": 168}  # three programs share an SM
    tiles = {
        "reads": (slots, heads, 2 * CHUNK, block_k),
        "values": (slots, heads, CHUNK, block_v),
        "writes": (slots, heads, CHUNK, block_k),
        "pairs": (slots, heads, CHUNK, CHUNK),
    }
    layout = attributes["state_layout"]
    final = (sequences, heads, *((key_dim, value_dim) if layout == "kv" else (value_dim, key_dim)))
    state_strides = {
        "INITIAL_STRIDE": (0, 0, 0, 0) if initial is None else key_first(initial.stride, layout),
        "FINAL_STRIDE": key_first((heads * key_dim * value_dim, key_dim * value_dim, final[3], 1), layout),
    }
    scan, scan_options, tile_v = (hopper_scan if fast else plain_scan)(
        common, state_strides, block_k, block_v, sequences
    )
    constants: dict[str, Any] = {
        "scratch": scratch,
        "tiles": tuple(tiles.values()),
        "decays": (slots, heads, block_k),
        "out": (batch, tokens, heads, value_dim),
        "final_state": final,
        "prepare": first_name,
        "prepare_grid": (heads, slots // 2 if paired else slots),
        "prepare_constants": prepare,
        "prepare_options": prepare_options,
        "scan_grid": (block_v // tile_v, heads, sequences),
        "scan_chunks": scan,
        "scan_options": scan_options,
    }
    operands: dict[str, TensorSpec | str | None] = {
        **dict(zip(names, (q, k, v, g, beta), strict=True)),
        "a_log": rate,
        "dt_bias": bias,
        "cu_seqlens": offsets,
    }
    scratch_types: dict[str, TensorSpec | str | None] = dict.fromkeys(tiles, scratch)
    state_types: dict[str, TensorSpec | str | None] = {
        "decays": "float32",
        "cu_seqlens": offsets,
        "initial_state": initial,
        "out": v.dtype,
        "final_state": "float32",
        "deltas": "float32" if deltas else None,
    }
    first = ahead_of_time(first_name, {**operands, **scratch_types, "decays": "float32"}, prepare, prepare_options)
    if fast:
        second = with_descriptors(ahead_of_time("scan_chunks", state_types, scan, scan_options), tile_v)
    else:
        second = ahead_of_time("scan_chunks", {**scratch_types, **state_types}, scan, scan_options)
    return KernelModule(render("kda_prefill_hopper" if fast else "kda_prefill", constants), (first, second))


def copies_in_16_bytes(spec: TensorSpec) -> bool:
    """Whether rows of 128 can be copied to shared memory in pieces of eight elements."""
    return spec.stride[-1] == 1 and all(stride % 8 == 0 for stride in spec.stride[:-1])


Scan = tuple[dict[str, Any], dict[str, Any], int]


def plain_scan(common: dict[str, Any], strides: dict[str, Any], block_k: int, block_v: int, sequences: int) -> Scan:
    """Constants, options and value channels a program of the form for any device."""
    del sequences
    tile_v = min(block_v, 32)
    blocks = {"BLOCK_K": block_k, "BLOCK_V": block_v, "TILE_V": tile_v, "INTERPRET": False}
    return {**common, **strides, **blocks}, {"num_warps": 4, "num_stages": 2}, tile_v


def hopper_scan(common: dict[str, Any], strides: dict[str, Any], block_k: int, block_v: int, sequences: int) -> Scan:
    """The same for Hopper: narrow tiles while they fit the device at once, else wide ones, which read less twice."""
    del block_k, block_v
    heads = common["H"] * sequences
    tile_v, stages = (32, 3) if heads <= 64 else (64, 2)
    kept = {name: common[name] for name in ("T", "H", "CHUNKS", "ALIGN")}
    return {**kept, **strides, "TILE_V": tile_v, "STAGES": stages}, {"num_warps": 4}, tile_v


def key_first(stride: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Strides (sequence, head, key channel, value channel) of a state."""
    return stride if layout == "kv" else (stride[0], stride[1], stride[3], stride[2])


def with_descriptors(launch: KernelLaunch, tile_v: int) -> KernelLaunch:
    """The launch with tensor memory descriptors, Triton's types of them, before its other arguments."""
    tiles = {
        "reads": (2 * CHUNK, HOPPER_SIDE),
        "values": (CHUNK, tile_v),
        "writes": (CHUNK, HOPPER_SIDE),
        "pairs": (CHUNK, CHUNK),
    }
    types = {
        name: f"tensordesc<bf16[{rows}, {columns}],{SHARED_TILE.format(min(2 * columns, 128))}>"
        for name, (rows, columns) in tiles.items()
    }
    signature = {**types, **launch.signature}
    return KernelLaunch(launch.function, signature, launch.constants, launch.divisible, launch.options)
