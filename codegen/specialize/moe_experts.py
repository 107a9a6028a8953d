"""Forms, shapes and tiles of routed experts."""

from dataclasses import dataclass, replace
from typing import Any

from kimigraph.codegen.kernel import KernelLaunch, KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, needed, padded, refuse, render

FEW_TOKENS = 16  # up to here every pick streams its own weights
SHARED_BLOCK = 1024  # elements of the shared experts that a program activates
COMBINE_BLOCK = 1024
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


def build(request: KernelRequest, tiling: Tiling | None = None) -> KernelModule:
    """Two or three launches for a few tokens; more with routing and sums of their own; CompileError for odd types."""
    experts = Experts.of(request)
    chosen = tiling or tiling_for(experts)
    return _few(request, experts, chosen) if experts.tokens <= FEW_TOKENS else _many(request, experts, chosen)


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

    @classmethod
    def of(cls, request: KernelRequest) -> "Experts":
        """Read from the operands; CompileError for types that the kernel does not multiply."""
        x, gate_up, down = (needed(request, name) for name in ("x", "gate_up", "down"))
        needed(request, "logits")
        up, shared = request.tensors.get("up"), request.tensors.get("shared_down")
        for name in ("gate_up", "down", "up", "shared_gate", "shared_up", "shared_down"):
            spec = request.tensors.get(name)
            if spec is not None and spec.dtype != x.dtype:
                raise refuse(request, f"{name} is {spec.dtype}, x is {x.dtype}", "give both one type")
        picks = int(request.attributes["picks"])
        if picks > MOST_PICKS:
            raise refuse(request, f"{picks} experts a token", f"at most {MOST_PICKS} are chosen in one kernel")
        outer = x.shape[1] if up is None else up.shape[0]
        tokens, width = x.shape
        inner = down.shape[2]
        finishes = up is not None or shared is not None
        last = 0 if shared is None else shared.shape[1]
        return cls(tokens, width, inner, gate_up.shape[0], picks, outer, last, x.dtype, finishes)

    @property
    def pairs(self) -> int:
        """Picks of all tokens."""
        return self.tokens * self.picks

    def most_row_tiles(self, lines: int) -> int:
        """How many tiles of ``lines`` picks of one expert there can be."""
        return min(self.pairs, ceil_div(self.pairs, lines) + min(self.count, self.pairs))


def tiling_for(experts: Experts) -> Tiling:
    """What measured best on an H200 at the widths of Kimi K3.1."""
    if experts.tokens > FEW_TOKENS:
        return _grouped_tiling(ceil_div(experts.pairs, experts.count), experts)
    if experts.dtype == "float32":
        return Tiling(Tile(16, 128, 4), Tile(4, 512, 4), finish_tile(experts))
    if experts.tokens == 1:
        closed = Tile(2, 1024, 4, parts=2) if experts.finishes else Tile(2, 512, 4)
        return Tiling(Tile(64, 128, 4, 4, dot=True), closed, finish_tile(experts))
    return Tiling(Tile(64, 64, 4, 4, dot=True), Tile(4, 512, 4), finish_tile(experts))


def _grouped_tiling(each: int, experts: Experts) -> Tiling:
    """For ``each`` picks an expert: tiles of lines about twice as long, so that most experts have one."""
    lines = min(max(padded(2 * each), 16), 64)
    if experts.dtype == "float32":
        tile = Tile(64, 32, 4, 3, min(lines, 32))
        return Tiling(tile, tile, finish_tile(experts))
    opened = Tile(64, 64, 4, 3 if each >= 64 else 4, lines)
    if each >= 64:
        return Tiling(opened, Tile(128, 64, 8, 3, 128), finish_tile(experts))
    closed = Tile(64, 64, 4, 5, lines) if lines == 16 else Tile(128, 64, 4, 4, lines)
    return Tiling(opened, closed, finish_tile(experts))


def finish_tile(experts: Experts) -> Tile:
    """The last launch: lanes for one token, else tiles of 16 tokens, by matrix units where the type allows."""
    if experts.tokens == 1:
        return Tile(4, 1024, 4, lines=1)
    return Tile(32, 64, 4, 4, 16, dot=True)


def _few(request: KernelRequest, experts: Experts, tiling: Tiling) -> KernelModule:
    tiling = _fitted(experts, tiling)
    opened, closed, finish = tiling.open, tiling.close, tiling.finish
    shape, act = _shape(experts), _activation(request)
    programs = experts.pairs * ceil_div(experts.inner, opened.columns) + _shared_programs(experts)
    constants: dict[str, Any] = {
        "open_experts": {
            **_open_strides(request),
            "LOGIT_STRIDE": needed(request, "logits").stride,
            "BIAS_STRIDE": _stride(request, "bias"),
            **{name: shape[name] for name in ("TOKENS", "WIDTH", "INNER", "SHARED")},
            **_choice(request, experts),
            **act,
            "TILE": opened.columns,
            "STEP": opened.step,
            "DOT": opened.dot,
            "BLOCK": SHARED_BLOCK,
        },
        "close_experts": {
            "DOWN_STRIDE": needed(request, "down").stride,
            **{name: shape[name] for name in ("TOKENS", "WIDTH", "INNER")},
            "PICKS": experts.picks,
            "PARTS": closed.parts,
            "TILE": closed.columns,
            "STEP": closed.step,
            "DOT": closed.dot,
        },
        **_finish(request, experts, finish, closed.parts),
    }
    grids = {
        "open": (programs,),
        "close": (experts.tokens * closed.parts * ceil_div(experts.width, closed.columns),),
        "finish": _finish_grid(experts, finish),
    }
    sizes = _sizes(experts, closed.parts)
    options = {"open": opened.options, "close": closed.options, "finish": finish.options}
    whole = {"sizes": sizes, "grids": grids, "options": options, **constants}
    operands: dict[str, TensorSpec | str | None] = dict(request.tensors)
    scratch = {"inner": experts.dtype, "chosen": "int32", "shared": experts.dtype if experts.shared else None}
    routed = "float32" if experts.finishes else experts.dtype
    launches = [
        _ahead(
            "open_experts",
            {**_take(operands, "x", "logits", "bias", "gate_up", "shared_gate", "shared_up"), **scratch},
            constants,
            opened,
        ),
        _ahead(
            "close_experts",
            {"inner": experts.dtype, "chosen": "int32", **_take(operands, "down"), "routed": routed},
            constants,
            closed,
        ),
        *_finish_launch(request, experts, constants, finish),
    ]
    return KernelModule(render("moe_experts", whole), tuple(launches), route="a pick at a time")


def _many(request: KernelRequest, experts: Experts, tiling: Tiling) -> KernelModule:
    opened, closed, finish = tiling.open, tiling.close, tiling.finish
    shape = _shape(experts)
    row_tiles = experts.most_row_tiles(opened.lines)
    listing = {"EXPERTS": experts.count, "EXPERT_BLOCK": padded(experts.count)}
    constants: dict[str, Any] = {
        "route_tokens": {
            "LOGIT_STRIDE": needed(request, "logits").stride,
            "BIAS_STRIDE": _stride(request, "bias"),
            "TOKENS": experts.tokens,
            **_choice(request, experts),
            "PICK_BLOCK": padded(experts.picks),
        },
        "open_groups": {
            **_open_strides(request),
            **{name: shape[name] for name in ("TOKENS", "WIDTH", "INNER", "SHARED")},
            **listing,
            "PICKS": experts.picks,
            "ROW_TILES": row_tiles,
            **_activation(request),
            "LINES": opened.lines,
            "TILE": opened.columns,
            "STEP": opened.step,
            "BLOCK": SHARED_BLOCK,
        },
        "close_groups": {
            "DOWN_STRIDE": needed(request, "down").stride,
            **{name: shape[name] for name in ("TOKENS", "WIDTH", "INNER")},
            **listing,
            "LINES": closed.lines,
            "TILE": closed.columns,
            "STEP": closed.step,
        },
        "combine": {
            "TOKENS": experts.tokens,
            "WIDTH": experts.width,
            "PICKS": experts.picks,
            "BLOCK": COMBINE_BLOCK,
        },
        **_finish(request, experts, finish, 1),
    }
    single = Tile(0, 0, 4, 1)
    grids = {
        "route": (experts.tokens,),
        "open": (row_tiles * ceil_div(experts.inner, opened.columns) + _shared_programs(experts),),
        "close": (experts.most_row_tiles(closed.lines) * ceil_div(experts.width, closed.columns),),
        "combine": (ceil_div(experts.tokens * experts.width, COMBINE_BLOCK),),
        "finish": _finish_grid(experts, finish),
    }
    sizes = _sizes(experts, 1) | {
        "members": (experts.count, experts.tokens),
        "counts": (experts.count,),
        "outer": (experts.pairs, experts.width),
    }
    options = {
        "route": single.options,
        "open": opened.options,
        "close": closed.options,
        "combine": single.options,
        "finish": finish.options,
    }
    whole = {"sizes": sizes, "grids": grids, "options": options, **constants}
    operands: dict[str, TensorSpec | str | None] = dict(request.tensors)
    lists = {"counts": "int32", "members": "int32"}
    routed = "float32" if experts.finishes else experts.dtype
    opens = {
        **_take(operands, "x", "gate_up"),
        "weight": "float32",
        **lists,
        **_take(operands, "shared_gate", "shared_up"),
        "inner": experts.dtype,
        "shared": experts.dtype if experts.shared else None,
    }
    routes = {**_take(operands, "logits", "bias"), "chosen": "int32", "weight": "float32", **lists}
    closes = {"inner": experts.dtype, **_take(operands, "down"), **lists, "outer": experts.dtype}
    launches = [
        _ahead("route_tokens", routes, constants, single),
        _ahead("open_groups", opens, constants, opened),
        _ahead("close_groups", closes, constants, closed),
        _ahead("combine", {"outer": experts.dtype, "routed": routed}, constants, single),
        *_finish_launch(request, experts, constants, finish),
    ]
    return KernelModule(render("moe_groups", whole), tuple(launches), route="picks listed by expert")


def _fitted(experts: Experts, tiling: Tiling) -> Tiling:
    """Parts that divide the picks, and one where nothing adds them up afterwards; lanes only in fp32."""
    closed = tiling.close
    parts = closed.parts if experts.finishes and experts.picks % closed.parts == 0 else 1
    narrow = experts.dtype != "float32"
    return Tiling(
        replace(tiling.open, dot=tiling.open.dot and narrow),
        replace(closed, parts=parts, dot=closed.dot and narrow),
        tiling.finish,
    )


def _shape(experts: Experts) -> dict[str, int]:
    return {
        "TOKENS": experts.tokens,
        "WIDTH": experts.width,
        "INNER": experts.inner,
        "SHARED": max(experts.shared, 1),
    }


def _sizes(experts: Experts, parts: int) -> dict[str, tuple[int, ...]]:
    return {
        "inner": (experts.pairs, experts.inner),
        "chosen": (experts.tokens, experts.picks),
        "shared": (experts.tokens, experts.shared),
        "routed": (parts, experts.tokens, experts.width),
        "out": (experts.tokens, experts.outer),
    }


def _open_strides(request: KernelRequest) -> dict[str, Any]:
    gate, linear = request.tensors.get("shared_gate"), request.tensors.get("shared_up")
    shared = (0, 0, 0, 0) if gate is None or linear is None else (*gate.stride, *linear.stride)
    return {
        "X_STRIDE": needed(request, "x").stride,
        "GATE_STRIDE": needed(request, "gate_up").stride,
        "SHARED_STRIDE": shared,
    }


def _choice(request: KernelRequest, experts: Experts) -> dict[str, Any]:
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


def _activation(request: KernelRequest) -> dict[str, Any]:
    attributes = request.attributes
    linear, limit = attributes["linear_beta"], attributes.get("limit")
    return {
        "SITU": attributes["activation"] == "situ",
        "BETA": float(attributes["beta"]),
        "LINEAR_BETA": 0.0 if linear is None else float(linear),
        "LIMIT": 0.0 if limit is None else float(limit),
    }


def _shared_programs(experts: Experts) -> int:
    return ceil_div(experts.tokens * experts.shared, SHARED_BLOCK)


def _finish(request: KernelRequest, experts: Experts, tile: Tile, parts: int) -> dict[str, Any]:
    up, down = request.tensors.get("up"), request.tensors.get("shared_down")
    constants = {
        "UP_STRIDE": (0, 0) if up is None else up.stride,
        "DOWN_STRIDE": (0, 0) if down is None else down.stride,
        "NORM_STRIDE": _stride(request, "norm_weight"),
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


def _finish_grid(experts: Experts, tile: Tile) -> tuple[int, int]:
    return ceil_div(experts.outer, tile.columns), ceil_div(experts.tokens, tile.lines)


def _finish_launch(
    request: KernelRequest, experts: Experts, constants: dict[str, Any], tile: Tile
) -> list[KernelLaunch]:
    if not experts.finishes:
        return []
    given: dict[str, TensorSpec | str | None] = {
        "routed": "float32",
        "norm_weight": request.tensors.get("norm_weight"),
        "up": request.tensors.get("up"),
        "shared": experts.dtype if experts.shared else None,
        "shared_down": request.tensors.get("shared_down"),
        "out": experts.dtype,
    }
    return [_ahead("finish_experts", given, constants, tile)]


def _ahead(
    name: str, operands: dict[str, TensorSpec | str | None], constants: dict[str, Any], tile: Tile
) -> KernelLaunch:
    takes = {} if name == "route_tokens" else {"INTERPRET": False}
    return ahead_of_time(name, operands, {**constants[name], **takes}, tile.options)


def _take(operands: dict[str, TensorSpec | str | None], *names: str) -> dict[str, TensorSpec | str | None]:
    return {name: operands.get(name) for name in names}


def _stride(request: KernelRequest, name: str) -> int:
    spec = request.tensors.get(name)
    return 0 if spec is None else spec.stride[-1]
