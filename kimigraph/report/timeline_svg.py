"""A timeline as a picture: lanes of a track below one another, time to the right, idle times named."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from kimigraph.ir.trace import BUBBLE, Span, Track

WIDTH, LEFT = 1200, 130
_LANE, _BAR, _HEAD, _FOOT = 34, 24, 26, 30
_LETTER = 6.1
"""Pixels of a letter at the size of names."""
_COLORS = (
    ("lightning_indexer", "#b5651d"),
    ("sparse_attention", "#8b3a62"),
    ("latent_attention", "#8b3a62"),
    ("kda_decode", "#2e6f57"),
    ("moe_experts", "#5b4b8a"),
    ("attention_residual", "#7a7a2a"),
    ("_write", "#4f7fa8"),
    ("horizontal", "#2f5f9e"),
    ("linear", "#2f5f9e"),
    ("bmm", "#2f5f9e"),
)
_OTHER, _IDLE = "#6d8299", "#e4e4e4"


@dataclass(frozen=True)
class Window:
    """Microseconds from where to where a picture shows a track."""

    start: float
    end: float

    @classmethod
    def around(cls, track: Track, first: str, last: str) -> "Window":
        """From the begin of the kernel called ``first`` to the end of ``last``."""
        spans = {span.name: span for span in track.kernels}
        return cls(spans[first].start, spans[last].end)

    @classmethod
    def whole(cls, track: Track) -> "Window":
        """All of a track."""
        return cls(0.0, max((span.end for span in track.spans), default=1.0))


def timeline_svg(title: str, tracks: Sequence[tuple[Track, Window]]) -> str:
    """The picture of some tracks, all to one scale, each with its own begin at the left."""
    scale = (WIDTH - LEFT - 12) / max(window.end - window.start for _, window in tracks)
    parts: list[str] = []
    top = 30
    for track, window in tracks:
        drawn = list(_track(track, window, scale, top))
        parts += drawn
        top += _HEAD + _LANE * len(_lanes(track, window)) + _FOOT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}" '
        'font-family="Helvetica, Arial, sans-serif">'
    )
    ground = f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>'
    return "\n".join([head, ground, _text(12, 20, title, 14, weight="bold"), *parts, "</svg>"]) + "\n"


def _track(track: Track, window: Window, scale: float, top: float) -> Iterator[str]:
    yield _text(12, top + 16, track.title, 12, weight="bold")
    lanes = _lanes(track, window)
    top += _HEAD
    for row, lane in enumerate(lanes):
        y = top + row * _LANE
        yield _text(12, y + 16, track.lanes.get(lane, f"lane {lane}").partition(",")[0], 11)
        for span in track.spans:
            if span.lane == lane and span.end > window.start and span.start < window.end:
                yield from _span(span, window, scale, y)
    yield from _axis(window, scale, top + len(lanes) * _LANE)


def _lanes(track: Track, window: Window) -> list[int]:
    """The lanes on which a kernel or a gap of the device lies in the window."""
    inside = [span for span in track.spans if span.end > window.start and span.start < window.end]
    shown = {span.lane for span in inside if span.kind != BUBBLE}
    alone = {span.lane for span in inside} - {span.lane for span in track.spans if span.kind != BUBBLE}
    return sorted(shown | alone)


def _span(span: Span, window: Window, scale: float, y: float) -> Iterator[str]:
    start, end = max(span.start, window.start), min(span.end, window.end)
    x, width = LEFT + (start - window.start) * scale, max((end - start) * scale, 0.6)
    idle = span.kind == BUBBLE
    fill = _IDLE if idle else next((color for part, color in _COLORS if part in span.name), _OTHER)
    line = 'stroke="#bbbbbb" stroke-dasharray="3 2"' if idle else 'stroke="#ffffff" stroke-width="0.6"'
    hint = escape(f"{span.name}: {span.start:.2f} to {span.end:.2f} us")
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" fill="{fill}" {line}>'
        f"<title>{hint}</title></rect>"
    )
    letters = int((width - 6) / _LETTER)
    if letters >= 4:
        name = span.name if len(span.name) <= letters else span.name[: letters - 1] + "…"
        yield _text(x + 3, y + 16, name, 10, "#666666" if idle else "#ffffff")


def _axis(window: Window, scale: float, y: float) -> Iterator[str]:
    length = window.end - window.start
    step = next(size for size in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1e9) if length / size <= 14)
    right = LEFT + length * scale
    yield f'<line x1="{LEFT}" y1="{y}" x2="{right:.1f}" y2="{y}" stroke="#999999"/>'
    for number in range(int(length / step) + 1):
        x = LEFT + number * step * scale
        yield f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}" stroke="#999999"/>'
        yield _text(x + 2, y + 14, f"{number * step:g} us", 9, "#666666")


def _text(x: float, y: float, text: str, size: int, fill: str = "#222222", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{fill}">{escape(text)}</text>'
    )
