"""Sizes of a call of routed experts, and what its kernels take from the request: strides, choice, activation."""

from dataclasses import dataclass
from typing import Any

from kimigraph.codegen.kernel import KernelLaunch, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, needed, padded, refuse

SHARED_BLOCK = 1024  # elements of the shared experts that a program activates
MOST_PICKS = 64  # rounds of the choice, which are unrolled


@dataclass(frozen=True)
class Tile:
    """How one launch is cut: columns of weights and lines of tokens a program, depth of a step, Triton's options."""

    columns: int
    step: int
    warps: int
    stages: int = 3
    lines: int = 16
    dot: bool = False
    parts: int = 1

    @property
    def options(self) -> dict[str, Any]:
        """For the launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class Tiling:
    """The cut of the launches that open the experts (gate and up), close them (down), and finish the block."""

    open: Tile
    close: Tile
    finish: Tile


@dataclass(frozen=True)
class Experts:
    """The sizes of a call."""

    tokens: int
    width: int
    inner: int
    count: int
    picks: int
    outer: int
    shared: int
    dtype: str
    finishes: bool
    packed: bool = False

    @classmethod
    def of(cls, request: KernelRequest) -> "Experts":
        """Read from the operands; CompileError for types that the kernel does not multiply."""
        x, gate_up, *_ = (needed(request, name) for name in ("x", "gate_up", "down", "logits"))
        up, shared = request.tensors.get("up"), request.tensors.get("shared_down")
        packed = _packed(request)
        same = ("up", "shared_gate", "shared_up", "shared_down", "residual")
        for name in same if packed else ("gate_up", "down", *same):
            spec = request.tensors.get(name)
            if spec is not None and spec.dtype != x.dtype:
                raise refuse(request, f"{name} is {spec.dtype}, x is {x.dtype}", "give both one type")
        picks = int(request.attributes["picks"])
        if picks > MOST_PICKS:
            raise refuse(request, f"{picks} experts a token", f"at most {MOST_PICKS} are chosen in one kernel")
        outer = x.shape[1] if up is None else up.shape[0]
        tokens, width = x.shape
        inner = gate_up.shape[1] // 2
        finishes = any(request.tensors.get(name) is not None for name in ("up", "shared_down", "residual"))
        last = 0 if shared is None else shared.shape[1]
        return cls(tokens, width, inner, gate_up.shape[0], picks, outer, last, x.dtype, finishes, packed)

    @property
    def pairs(self) -> int:
        """Picks of all tokens."""
        return self.tokens * self.picks

    def most_row_tiles(self, lines: int) -> int:
        """How many tiles of ``lines`` picks of one expert there can be."""
        return min(self.pairs, ceil_div(self.pairs, lines) + min(self.count, self.pairs))


def _packed(request: KernelRequest) -> bool:
    """Whether the weights are MXFP4; CompileError where kernels cannot read them four bytes at a time."""
    weights = [needed(request, name) for name in ("gate_up", "down")]
    if all(spec.dtype != "uint8" for spec in weights):
        return False
    whole = all(spec.dtype == "uint8" and side_by_side(spec) for spec in weights)
    if not whole or any(spec.shape[1] * spec.shape[2] % 16 for spec in weights):
        raise refuse(request, "MXFP4 experts are no multiples of 16 bytes", "give both weights as mxfp4_quantize does")
    if needed(request, "x").dtype == "float16":
        raise refuse(request, "MXFP4 weights exceed float16", "use bfloat16 or float32")
    return True


def finish_tile(experts: Experts) -> Tile:
    """The last launch: lanes for one token, else tiles of 16 tokens, by matrix units where the type allows.

    Without shared experts lanes spill kilobytes (the compiler unrolls the only product that is left).
    """
    if experts.tokens == 1 and experts.shared:
        return Tile(4, 1024, 4, lines=1)
    return Tile(32, 64, 4, 4, 16, dot=True)


def shape_constants(experts: Experts) -> dict[str, int]:
    """Sizes as kernels call them; no shared experts count as one column, which nobody reads."""
    return {
        "TOKENS": experts.tokens,
        "WIDTH": experts.width,
        "INNER": experts.inner,
        "SHARED": max(experts.shared, 1),
    }


def scratch_sizes(experts: Experts, parts: int) -> dict[str, tuple[int, ...]]:
    """Of what lies between launches, and of the results."""
    return {
        "inner": (experts.pairs, experts.inner),
        "chosen": (experts.tokens, experts.picks),
        "shared": (experts.tokens, experts.shared),
        "routed": (parts, experts.tokens, experts.width),
        "out": (experts.tokens, experts.outer),
    }


def open_strides(request: KernelRequest) -> dict[str, Any]:
    """Strides of what the first product and the shared experts read."""
    gate, linear = request.tensors.get("shared_gate"), request.tensors.get("shared_up")
    shared = (0, 0, 0, 0) if gate is None or linear is None else (*gate.stride, *linear.stride)
    return {
        "X_STRIDE": needed(request, "x").stride,
        "GATE_STRIDE": needed(request, "gate_up").stride,
        "SHARED_STRIDE": shared,
    }


def choice(request: KernelRequest, experts: Experts) -> dict[str, Any]:
    """How a router chooses."""
    attributes = request.attributes
    groups = int(attributes["groups"])
    members = experts.count // groups
    return {
        "GROUPS": groups,
        "MEMBERS": members,
        "GROUP_PICKS": int(attributes["group_picks"]),
        "PICKS": experts.picks,
        "RENORMALIZE": bool(attributes["renormalize"]),
        "SCALE": float(attributes["scale"]),
        "GROUP_BLOCK": padded(groups),
        "MEMBER_BLOCK": padded(members),
    }


def activation(request: KernelRequest) -> dict[str, Any]:
    """Which gate, with 0 for a bound that is absent."""
    attributes = request.attributes
    linear, limit = attributes["linear_beta"], attributes.get("limit")
    return {
        "SITU": attributes["activation"] == "situ",
        "BETA": float(attributes["beta"]),
        "LINEAR_BETA": 0.0 if linear is None else float(linear),
        "LIMIT": 0.0 if limit is None else float(limit),
    }


def shared_programs(experts: Experts) -> int:
    """Programs that activate the shared experts."""
    return ceil_div(experts.tokens * experts.shared, SHARED_BLOCK)


def finish_constants(request: KernelRequest, experts: Experts, tile: Tile, parts: int) -> dict[str, Any]:
    """Constants of ``finish_experts``; nothing where nothing follows."""
    up, down, residual = (request.tensors.get(name) for name in ("up", "shared_down", "residual"))
    constants = {
        "UP_STRIDE": (0, 0) if up is None else up.stride,
        "DOWN_STRIDE": (0, 0) if down is None else down.stride,
        "NORM_STRIDE": last_stride(request, "norm_weight"),
        "RESIDUAL_STRIDE": (0, 0) if residual is None else residual.stride,
        "TOKENS": experts.tokens,
        "WIDTH": experts.width,
        "OUTER": experts.outer,
        "SHARED": max(experts.shared, 1),
        "PARTS": parts,
        "EPS": float(request.attributes["eps"]),
        "TILE": tile.columns,
        "LINES": tile.lines,
        "STEP": tile.step,
        "DOT": tile.dot,
    }
    return {"finish_experts": constants} if experts.finishes else {}


def finish_grid(experts: Experts, tile: Tile) -> tuple[int, int]:
    """Programs of ``finish_experts``."""
    return ceil_div(experts.outer, tile.columns), ceil_div(experts.tokens, tile.lines)


def finish_launches(
    request: KernelRequest, experts: Experts, constants: dict[str, Any], tile: Tile
) -> list[KernelLaunch]:
    """The launch of ``finish_experts``, if there is one."""
    if not experts.finishes:
        return []
    given: dict[str, TensorSpec | str | None] = {
        "routed": "float32",
        "norm_weight": request.tensors.get("norm_weight"),
        "up": request.tensors.get("up"),
        "shared": experts.dtype if experts.shared else None,
        "shared_down": request.tensors.get("shared_down"),
        "residual": request.tensors.get("residual"),
        "out": experts.dtype,
    }
    return [launch_record("finish_experts", given, constants, tile)]


def launch_record(
    name: str, operands: dict[str, TensorSpec | str | None], constants: dict[str, Any], tile: Tile
) -> KernelLaunch:
    """The launch of a function for an ahead-of-time build, with its constants and the options of its tile."""
    takes = {} if name == "route_tokens" else {"INTERPRET": False}
    return ahead_of_time(name, operands, {**constants[name], **takes}, tile.options)


def take(operands: dict[str, TensorSpec | str | None], *names: str) -> dict[str, TensorSpec | str | None]:
    """The operands of these names, in this order; None where the call has none."""
    return {name: operands.get(name) for name in names}


def last_stride(request: KernelRequest, name: str) -> int:
    """Of an operand's last dimension; 0 where the call has none."""
    spec = request.tensors.get(name)
    return 0 if spec is None else spec.stride[-1]


def side_by_side(spec: TensorSpec) -> bool:
    """Whether the rows of all experts' weights lie side by side."""
    return spec.aligned and spec.stride == (spec.shape[1] * spec.shape[2], spec.shape[2], 1)
