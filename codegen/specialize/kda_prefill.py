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
HOPPER_SIDE = 128
PROGRAMS_AT_ONCE = 132  # multiprocessors of an H200
SEQUENCES_AT_ONCE = 4096  # entries of cu_seqlens that a program looks through in one load

Constants = dict[str, Any]
Types = dict[str, TensorSpec | str | None]


def build(request: KernelRequest, *, deltas: bool = False) -> KernelModule:
    """The two launches; ``deltas`` asks for a compiled form that also writes every corrected delta u.

    CompileError for heads that exceed a program.
    """
    q, k, v, g = (needed(request, name) for name in ("q", "k", "v", "g"))
    offsets = request.tensors.get("cu_seqlens")
    batch, tokens, heads, key_dim = q.shape
    value_dim = v.shape[-1]
    block_k, block_v = padded(key_dim, 16), padded(value_dim, 16)
    if max(block_k, block_v) > 256:
        raise refuse(request, f"heads of {key_dim} and {value_dim} channels exceed a program", "at most 256 fit")
    sequences = batch if offsets is None else offsets.shape[0] - 1
    if sequences > SEQUENCES_AT_ONCE and offsets is not None:
        raise refuse(request, f"{sequences} packed sequences", f"at most {SEQUENCES_AT_ONCE} in one call")
    narrow = {spec.dtype for spec in (q, k, v)} == {"bfloat16"}
    hopper = narrow and key_dim == value_dim == HOPPER_SIDE and batch * tokens > 0 and is_hopper(request.target)
    copied = [spec for spec in (q, k, g) if spec.dtype == "bfloat16"]
    in_shared = hopper and bounded(request) and all(copies_in_16_bytes(spec) for spec in copied)
    chunks = ceil_div(tokens, CHUNK)
    # A packed sequence may begin and end inside a chunk, so each can cost one slot more.
    slots = batch * chunks if offsets is None else tokens // CHUNK + sequences
    scratch = "bfloat16" if narrow else "float32"
    common: Constants = {"T": tokens, "H": heads, "CHUNKS": chunks}
    layout = request.attributes["state_layout"]
    final = (sequences, heads, *((key_dim, value_dim) if layout == "kv" else (value_dim, key_dim)))
    first = prepare_hopper(request, common, deltas) if in_shared else prepare_plain(request, common, scratch, deltas)
    scan = scan_hopper if hopper else scan_plain
    second, tile_v = scan(request, {**common, **state_strides(request, final)}, scratch, deltas)
    constants: Constants = {
        "scratch": scratch,
        "tiles": (
            (slots, heads, 2 * CHUNK, block_k),
            (slots, heads, block_k, CHUNK),
            (slots, heads, CHUNK, CHUNK),
        ),
        "decays": (slots, heads, block_k),
        "out": (batch, tokens, heads, value_dim),
        "final_state": final,
        "prepare": first.function,
        "prepare_grid": (heads, slots),
        "prepare_constants": without_absent(first.constants, "DELTAS"),
        "prepare_options": first.options,
        "scan_grid": (block_v // tile_v, heads, sequences),
        "scan_chunks": without_absent(second.constants),
        "scan_options": second.options,
    }
    return KernelModule(render("kda_prefill_hopper" if hopper else "kda_prefill", constants), (first, second))


def without_absent(constants: Constants, *given_at_launch: str) -> Constants:
    """The constants that a launch passes by name; absent operands and what it decides itself come otherwise."""
    return {name: value for name, value in constants.items() if name.isupper() and name not in given_at_launch}


def bounded(request: KernelRequest) -> bool:
    """Whether the decay of a chunk is known to stay where fp32 holds a factor and its inverse."""
    lower_bound = request.attributes.get("lower_bound")
    return lower_bound is not None and -float(lower_bound) * CHUNK <= SAFE_LOG_DECAY


def copies_in_16_bytes(spec: TensorSpec) -> bool:
    """Whether rows of 128 can be copied to shared memory in pieces of eight elements."""
    return spec.aligned and spec.stride[-1] == 1 and all(stride % 8 == 0 for stride in spec.stride[:-1])


def prepare_constants(request: KernelRequest, common: Constants, deltas: bool) -> Constants:
    """What both forms of the first launch are told."""
    q, k, g, beta = (needed(request, name) for name in ("q", "k", "g", "beta"))
    rate, bias, offsets = (request.tensors.get(name) for name in ("a_log", "dt_bias", "cu_seqlens"))
    attributes = request.attributes
    lower_bound = attributes.get("lower_bound")
    sequences = q.shape[0] if offsets is None else offsets.shape[0] - 1
    return {
        **common,
        "SEQUENCES": sequences,
        "SCALE": float(attributes["scale"]),
        "L2_NORM": bool(attributes["l2_norm"]),
        "L2_EPS": float(attributes["l2_eps"]),
        "LOWER_BOUND": None if lower_bound is None else float(lower_bound),
        "Q_STRIDE": q.stride,
        "K_STRIDE": k.stride,
        "G_STRIDE": g.stride,
        "BETA_STRIDE": beta.stride,
        "RATE_STRIDE": 0 if rate is None else per_head(request, rate),
        "BIAS_STRIDE": (0, 0) if bias is None else per_channel(request, bias, q.shape[2], q.shape[3]),
        "BLOCK_N": padded(sequences, 32),
        "DELTAS": deltas,
    }


def prepare_operands(request: KernelRequest, scratch: str) -> Types:
    """The arguments of either form of the first launch."""
    names = ("q", "k", "g", "beta", "a_log", "dt_bias", "cu_seqlens")
    given: Types = {name: request.tensors.get(name) for name in names}
    return {**given, **dict.fromkeys(("reads", "writes", "pairs"), scratch), "decays": "float32"}


def prepare_plain(request: KernelRequest, common: Constants, scratch: str, deltas: bool) -> KernelLaunch:
    """The form for any size, type, layout and decay."""
    key_dim = needed(request, "q").shape[-1]
    block_k = padded(key_dim, 16)
    constants = prepare_constants(request, common, deltas)
    constants |= {
        "K": key_dim,
        "C": CHUNK,
        # In fp32 the sums of a whole chunk's decay would be the largest error by far.
        "BOUNDED": bounded(request) and scratch == "bfloat16",
        "BLOCK_K": block_k,
        "INTERPRET": False,
    }
    options = {"num_warps": 4 if scratch == "bfloat16" and block_k <= 128 else 8, "num_stages": 1}
    return ahead_of_time("prepare_chunks", prepare_operands(request, scratch), constants, options)


def prepare_hopper(request: KernelRequest, common: Constants, deltas: bool) -> KernelLaunch:
    """The form with operands in shared memory; with 128 registers a thread, four programs share a multiprocessor."""
    constants = prepare_constants(request, common, deltas)
    constants["GATE_IN_TILE"] = needed(request, "g").dtype == "bfloat16"
    options = {"num_warps": 4, "maxnreg": 128}
    return ahead_of_time("prepare_chunks_in_shared", prepare_operands(request, "bfloat16"), constants, options)


def state_strides(request: KernelRequest, final: tuple[int, ...]) -> Constants:
    """Strides (sequence, head, key channel, value channel) of both states."""
    initial, layout = request.tensors.get("initial_state"), request.attributes["state_layout"]
    side, width = final[2] * final[3], final[3]
    return {
        "INITIAL_STRIDE": (0, 0, 0, 0) if initial is None else key_first(initial.stride, layout),
        "FINAL_STRIDE": key_first((final[1] * side, side, width, 1), layout),
    }


def key_first(stride: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Strides (sequence, head, key channel, value channel) of a state."""
    return stride if layout == "kv" else (stride[0], stride[1], stride[3], stride[2])


def scan_types(request: KernelRequest, deltas: bool) -> Types:
    """The arguments of the second launch that both forms have."""
    return {
        "cu_seqlens": request.tensors.get("cu_seqlens"),
        "initial_state": request.tensors.get("initial_state"),
        "out": needed(request, "v").dtype,
        "final_state": "float32",
        "deltas": "float32" if deltas else None,
    }


def scan_plain(request: KernelRequest, common: Constants, scratch: str, deltas: bool) -> tuple[KernelLaunch, int]:
    """The second launch for any device, and the value channels a program."""
    q, v = needed(request, "q"), needed(request, "v")
    tile_v = min(padded(v.shape[-1], 16), 32)
    constants = {
        **common,
        "K": q.shape[-1],
        "V": v.shape[-1],
        "C": CHUNK,
        "V_STRIDE": v.stride,
        "BLOCK_K": padded(q.shape[-1], 16),
        "TILE_V": tile_v,
        "INTERPRET": False,
    }
    types: Types = {"v": v, **dict.fromkeys(("reads", "writes", "pairs"), scratch), "decays": "float32"}
    types |= scan_types(request, deltas)
    return ahead_of_time("scan_chunks", types, constants, {"num_warps": 4, "num_stages": 2}), tile_v


def scan_hopper(request: KernelRequest, common: Constants, scratch: str, deltas: bool) -> tuple[KernelLaunch, int]:
    """The same for Hopper: a warp group a program, 64 value channels."""
    del scratch
    tile_v = 64
    offsets = request.tensors.get("cu_seqlens")
    sequences = needed(request, "q").shape[0] if offsets is None else offsets.shape[0] - 1
    programs = common["H"] * sequences * (HOPPER_SIDE // tile_v)
    constants = {
        **common,
        "SEQUENCES": sequences,
        "BLOCK_N": padded(sequences),
        "TILE_V": tile_v,
        # One program a multiprocessor has its tiles come from further ahead; else two share one.
        "STAGES": 5 if programs <= PROGRAMS_AT_ONCE else 3,
    }
    options = {"num_warps": tile_v // 16, "maxnreg": 104}
    launch = ahead_of_time("scan_chunks", scan_types(request, deltas), constants, options)
    tiles = {
        "reads": (2 * CHUNK, HOPPER_SIDE),
        "values": (CHUNK, tile_v),
        "writes": (HOPPER_SIDE, CHUNK),
        "pairs": (CHUNK, CHUNK),
        "decays": (1, HOPPER_SIDE),
        "results": (CHUNK, tile_v),
    }
    # Descriptors in tensor memory are arguments of Triton's own types, before the others.
    types = {name: descriptor(rows, columns, single=name == "decays") for name, (rows, columns) in tiles.items()}
    signature = {**types, **launch.signature}
    return KernelLaunch(launch.function, signature, launch.constants, launch.divisible, launch.options), tile_v


def descriptor(rows: int, columns: int, *, single: bool) -> str:
    """Triton's type of a descriptor of tiles in bf16, or of rows in fp32 (``single``)."""
    swizzle, bits, element = (0, 32, "fp32") if single else (min(2 * columns, 128), 16, "bf16")
    layout = f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank=2)"
    return f"tensordesc<{element}[{rows}, {columns}],{layout}>"
