# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Places in a histogram for order codes, the largest code first: a window around 16 binades, and parts of a range.

The window has 128 places for each binade, both signs, from a row's largest magnitude down; one place holds all that is
nearer to 0.
"""

import triton
import triton.language as tl


@triton.jit
def window(peak):
    """Where the two halves of the window end, in steps of 2 ** 16 codes; ``peak`` is the bits of the magnitude."""
    lowest = tl.maximum((peak >> 23) - 15, 0) << 7
    return 0x7FFF - lowest, 0x8000 + lowest + 2047


@triton.jit
def window_place(code, negative, positive):
    """The place of a code, 0 to 4094."""
    step = (code >> 16).to(tl.int32)
    return tl.minimum(tl.maximum(negative - step, 0), 2047) + tl.minimum(positive - step, 2047)


@triton.jit
def window_range(place, negative, positive):
    """The first and the last code of a place; code 0 is nobody's."""
    begin = tl.where(place < 2047, positive - place, negative + 2047 - place).to(tl.uint32) << 16
    last = tl.where(place <= 2047, positive - place, negative + 2047 - place).to(tl.uint32) << 16
    return tl.where(place == 4094, 1, begin).to(tl.uint32), last | 0xFFFF


@triton.jit
def range_shift(begin, last):
    """How far the distances in a range are to be shifted so that they fall into 4096 places."""
    shift = (begin & 0).to(tl.int32)
    while ((last - begin) >> shift) > 4095:
        shift += 1
    return shift


@triton.jit
def part_of_range(place, shift, begin, last):
    """The first and the last code of a part of the range."""
    end = last - (place.to(tl.uint32) << shift)
    width = (1 << shift).to(tl.uint32) - 1
    return tl.where(end - begin > width, end - width, begin), end
