"""E4M3, E8M0 and MXFP8 in exact rational arithmetic, from the text of the specifications alone."""

import math
from bisect import bisect_left
from fractions import Fraction


def e4m3_value(code: int) -> Fraction:
    """The value of one of the codes 0 to 0x7E: sign 0, exponent bias 7, 3 mantissa bits."""
    exponent, mantissa = code >> 3, code & 7
    return (
        Fraction(mantissa, 8) / 2**6 if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    )


MAGNITUDES = [e4m3_value(code) for code in range(0x7F)]


def e4m3_code(value: Fraction, negative: bool = False) -> int:
    """The code nearest to ``value``, ties to the even code, saturating at 448; ``negative`` is for the sign of zero."""
    sign, size = 0x80 if value < 0 or negative else 0, abs(value)
    above = bisect_left(MAGNITUDES, size)
    if above == len(MAGNITUDES):
        return sign | 0x7E
    if MAGNITUDES[above] == size:
        return sign | above
    low, high = size - MAGNITUDES[above - 1], MAGNITUDES[above] - size
    return sign | (above if high < low or (high == low and above % 2 == 0) else above - 1)


def scale_exponent(largest: Fraction, rounding: str) -> int:
    """The exponent of the scale of a group whose largest magnitude is ``largest``, within what E8M0 holds."""
    if rounding == "rceil":
        return next((e for e in range(-127, 128) if largest <= 448 * Fraction(2) ** e), 127)
    return next((e for e in range(127, -128, -1) if Fraction(2) ** (e + 8) <= largest), -127)


def mxfp8(values: list[float], rounding: str) -> tuple[int, list[int]]:
    """One group of numbers, infinities or NaN among them -> its E8M0 byte and its E4M3 codes."""
    if any(math.isnan(value) for value in values):
        return 255, [0x7F] * len(values)
    largest = max(abs(value) for value in values)
    if math.isinf(largest):
        exponent = {"rceil": 127, "floor": 120}[rounding]
    else:
        exponent = scale_exponent(Fraction(largest), rounding)
    codes = [
        (0xFE if value < 0 else 0x7E)
        if math.isinf(value)
        else e4m3_code(Fraction(value) / Fraction(2) ** exponent, math.copysign(1, value) < 0)
        for value in values
    ]
    return exponent + 127, codes
