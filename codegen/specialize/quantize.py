"""Shapes, strides and tiles of the quantisers: groups of rows in any layout, or one behind the other in memory."""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, needed, padded, refuse, render

ELEMENTS = 1024  # of a program: 16 a thread
WARPS = 2
MOST_GROUP = 8192
MOST_ROTATED = 1024


def build_mxfp8(request: KernelRequest) -> KernelModule:
    """``mxfp8_quantize``; CompileError for a row or a group that exceeds a program."""
    return _build(request, int(request.attributes["group"]), {"MX": True, "POWER2": False})


def build_fp8(request: KernelRequest) -> KernelModule:
    """``fp8_quantize``; CompileError for a row or a tile that exceeds a program."""
    form = {"MX": False, "POWER2": request.attributes["scales"] == "power2"}
    return _build(request, int(request.attributes["tile"]), form)


def _build(request: KernelRequest, group: int, form: dict[str, Any]) -> KernelModule:
    x = needed(request, "x")
    width, rotate = x.shape[-1], bool(request.attributes.get("rotate", False))
    group = min(group, max(width, 1))
    groups = ceil_div(width, group)
    sizes, strides = leading(request, x)
    rows = sizes[0] * sizes[1] * sizes[2]
    if group > MOST_GROUP or (rotate and width > MOST_ROTATED):
        most = MOST_ROTATED if rotate else MOST_GROUP
        raise refuse(request, f"a group of {group} in rows of {width} exceeds a program", f"at most {most} fit")
    if rotate and width % group:
        raise refuse(request, f"rotated rows of {width} are no multiple of {group}", "choose another group")
    block = padded(group)
    block_r = groups if rotate else min(max(ELEMENTS // block, 1), padded(rows * groups))
    constants: dict[str, Any] = {
        "LINES": rows * groups,
        "GROUPS": groups,
        "GROUP": group,
        "D": width,
        "SIZE": sizes,
        "STRIDE": (*strides, x.stride[-1]),
        "FLAT": width % group == 0 and _contiguous(x) and not rotate,
        **form,
        "CEIL": request.attributes.get("rounding", "rceil") == "rceil",
        "ROTATE": rotate,
        "BLOCK_R": block_r,
        "BLOCK_E": block,
        "INTERPRET": False,
    }
    # Fused multiply-adds would round otherwise than the reference does.
    options = {"num_warps": 4 if rotate or block > ELEMENTS else WARPS, "num_stages": 1, "enable_fp_fusion": False}
    scales = "uint8" if form["MX"] else "float32"
    operands: dict[str, TensorSpec | str | None] = {"x": x, "values": "uint8", "scales": scales}
    text = render(
        "quantize_groups",
        {
            "values": x.shape,
            "scales": (*x.shape[:-1], groups),
            "grid": (rows if rotate else ceil_div(rows * groups, block_r),),
            "quantize_groups": constants,
            "options": options,
        },
    )
    return KernelModule(text, (ahead_of_time("quantize_groups", operands, constants, options),))


def leading(request: KernelRequest, x: TensorSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of the dims before the last, as three; neighbours that count through memory become one."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(x.shape[:-1], x.stride[:-1], strict=True):
        if size == 1:
            continue
        if strides and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    if len(sizes) > 3:
        raise refuse(request, f"x has strides {list(x.stride)}", "pass it contiguous, or in at most 4 dims")
    missing = 3 - len(sizes)
    return (1,) * missing + tuple(sizes), (0,) * missing + tuple(strides)


def _contiguous(x: TensorSpec) -> bool:
    step = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
