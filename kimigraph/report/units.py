"""Numbers as people read them."""


def scaled(value: float | None, unit: str) -> str:
    """1536000 bytes as ``1.54 MB``; an empty text for what is not known."""
    if value is None:
        return ""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    raise AssertionError


def seconds(value: float | None) -> str:
    """Seconds with a fitting unit."""
    if value is None:
        return ""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def percent(part: float) -> str:
    """A share of one: 0.123 as ``12.3 %``."""
    return f"{part * 100:.1f} %"
