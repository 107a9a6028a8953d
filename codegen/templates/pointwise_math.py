# pyright: basic, reportAttributeAccessIssue=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Functions that generated kernels use: what the interpreter gets wrong, and what Triton lacks or does slowly."""

import triton
import triton.language as tl


@triton.jit
def round_to_bf16(value, INTERPRET: tl.constexpr):
    """fp32 -> the nearest bf16 number, as fp32, ties to even; the interpreter's own cast truncates."""
    if INTERPRET:
        bits = value.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        rounded = tl.where(value != value, value, nearest.to(tl.float32, bitcast=True))
    else:
        rounded = value.to(tl.bfloat16).to(tl.float32)
    return rounded


@triton.jit
def quotient(above, below, INTERPRET: tl.constexpr):
    """above / below in fp32 to two units in the last place; 0 where ``below`` is past 2^126."""
    if INTERPRET:
        result = above / below
    else:
        result = tl.extra.cuda.libdevice.fast_dividef(above, below)
    return result


@triton.jit
def hyperbolic_tangent(x, INTERPRET: tl.constexpr):
    """tanh in fp32 to 2e-6 of its value: a polynomial where exponentials would cancel, and no branch."""
    square = x * x
    near = tl.fma(tl.fma(square, 0.13333333333, -0.33333333333) * square, x, x)
    far = 1.0 - quotient(2.0, tl.exp2(x * 2.885390081777927) + 1.0, INTERPRET)
    return tl.where(tl.abs(x) < 0.15, near, far)


@triton.jit
def log_one_plus(x):
    """log(1 + x) in fp32, to the last bits for small x too."""
    total = 1.0 + x
    corrected = tl.log(total) * (x / (total - 1.0))
    return tl.where(total == 1.0, x, tl.where(total == float("inf"), total, corrected))


@triton.jit
def ask_for(places, INTERPRET: tl.constexpr):
    """Start to bring what lies at ``places`` into the L2 cache; nobody waits for it."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0",
            "=r,l",
            [places.to(tl.uint64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def start_next_launch(INTERPRET: tl.constexpr):
    """The next launch may begin on what is free of the device; it waits for the end of this one itself."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_earlier_launch(INTERPRET: tl.constexpr):
    """Wait until what the launches before this one wrote can be read, past the L1 cache."""
    if not INTERPRET:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def plus_product(left, right, total, INTERPRET: tl.constexpr):
    """total + left @ right, in fp32; the interpreter multiplies the bits of bf16 numbers, so it gets wider ones."""
    if INTERPRET:
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(left, right, total)
    return total
