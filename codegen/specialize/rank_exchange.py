"""Collectives in one launch: which calls the kernels can serve, and how their words are divided."""

from math import prod
from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, needed, refuse, render

WORD = 4
BLOCKS = {True: 512, False: 1024}
"""Words of a program: of up to 64 k words, of more."""
FEW_WORDS = 1 << 16
NO_FLOAT, NO_INTEGER = -1, -(1 << 31)
"""Words that say that none has come: two bf16 or one fp32 that are NaN, and the least int32."""
OTHER_NAN = 0x7FFF7FFF
SIZES = {"bfloat16": 2, "float32": 4, "int32": 4}


def build_sum(request: KernelRequest) -> KernelModule:
    """``rank_sum``; CompileError for other types, strides and an odd number of bf16."""
    addend = needed(request, "addend")
    words, pairs = _words(request, addend), addend.dtype == "bfloat16"
    constants: dict[str, Any] = {
        "WORDS": words,
        "WAYS": int(request.attributes["ways"]),
        "NONE": NO_FLOAT,
        "PAIRS": pairs,
        "BLOCK": BLOCKS[words <= FEW_WORDS],
    }
    return _module("rank_sum", "sum_ranks", request, constants, {"out": addend.shape}, "addend")


def build_gather(request: KernelRequest) -> KernelModule:
    """``rank_gather``; CompileError for other types, strides and runs that are no whole words."""
    part, dim = needed(request, "part"), int(request.attributes["dim"])
    words, ways = _words(request, part), int(request.attributes["ways"])
    run = prod(part.shape[dim:]) * SIZES[part.dtype]
    if run % WORD:
        raise refuse(request, f"{run} bytes along dim {dim} are no whole words", "gather along another dim")
    integer = part.dtype == "int32"
    constants: dict[str, Any] = {
        "WORDS": words,
        "RUN": run // WORD,
        "WAYS": ways,
        "NONE": NO_INTEGER if integer else NO_FLOAT,
        "INSTEAD": NO_INTEGER + 1 if integer else OTHER_NAN,
        "BLOCK": BLOCKS[words <= FEW_WORDS],
    }
    out = (*part.shape[:dim], part.shape[dim] * ways, *part.shape[dim + 1 :])
    return _module("rank_gather", "gather_ranks", request, constants, {"out": out, "dim": dim}, "part")


def serves(spec: TensorSpec) -> bool:
    """Whether the words of a tensor lie one behind the other, of a type that is known here."""
    size = SIZES.get(spec.dtype, 0)
    step = 1
    for extent, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return size > 0 and spec.aligned and 0 < step * size and step * size % WORD == 0


def _words(request: KernelRequest, spec: TensorSpec) -> int:
    if int(request.attributes["ways"]) < 2:
        raise refuse(request, "one rank has nobody to meet", "call it with two or more")
    if not serves(spec):
        remedy = "it takes contiguous bf16, fp32 and int32 at multiples of 16 bytes"
        raise refuse(request, f"strides {list(spec.stride)} of {spec.dtype}", remedy)
    return prod(spec.shape) * SIZES[spec.dtype] // WORD


def _module(
    template: str, function: str, request: KernelRequest, constants: dict[str, Any], more: dict[str, Any], given: str
) -> KernelModule:
    options = {"num_warps": 4}
    grid = (ceil_div(constants["WORDS"], constants["BLOCK"]),)
    whole = {"group": request.attributes["group"], "grid": grid, **more, function: constants, "options": options}
    operands: dict[str, TensorSpec | str | None] = {given: "int32", "out": "int32", "peers": "int64", "rounds": "int32"}
    return KernelModule(render(template, whole), (ahead_of_time(function, operands, constants, options),))
