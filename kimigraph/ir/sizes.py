"""Numbers of bytes as people write them."""

from kimigraph.ir.errors import UsageError

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """``1500``, ``500K``, ``500M`` or ``20G`` as a number of bytes. UsageError for other text."""
    number, factor = text.strip(), 1
    if number[-1:].upper() in _UNITS:
        number, factor = number[:-1], _UNITS[number[-1].upper()]
    if not number.isdecimal():
        raise UsageError(f"{text!r} is no size: write a number of bytes, or one with K, M, G or T behind it")
    return int(number) * factor


def format_bytes(size: int) -> str:
    """1536 as ``1.5 KiB``."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if unit != "B" else f"{size} B"
        value /= 1024
    return f"{value:.3g} GiB"
