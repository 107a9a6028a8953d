"""Why a request misses: the component-wise difference to the nearest one that is stored."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kimigraph.runtime.cache.canonical import Components, differences
from kimigraph.runtime.cache.entries import BadEntryError, unseal
from kimigraph.runtime.cache.place import Place

MOST_COMPARED = 200
"""How many stored requests are looked at, the latest first."""

MOST_SHOWN = 3
_WEIGHTS = {"model": 8, "shape": 2, "target": 2}
"""Components that make two requests unlike: a difference there counts more."""


@dataclass(frozen=True)
class Nearest:
    """The stored request that is most like another, and in what they differ: (component, stored, asked)."""

    front_key: str
    graph_key: str
    differences: tuple[tuple[str, Any, Any], ...]

    def sentence(self) -> str:
        """The reason of a miss in one line."""
        shown = [f"{name} ({_short(stored)} there, {_short(asked)} here)" for name, stored, asked in self.differences]
        rest = len(shown) - MOST_SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        return f"not compiled before; the nearest entry differs in {', '.join(shown[:MOST_SHOWN])}{more}"


def nearest(place: Place, components: Components) -> Nearest | None:
    """The stored request that differs in the least; None when nothing is stored."""
    best: Nearest | None = None
    for key, body in stored_fronts(place):
        found = tuple(differences(body["components"], components))
        candidate = Nearest(key, str(body["graph_key"]), found)
        if best is None or _distance(candidate) < _distance(best):
            best = candidate
    return best


def stored_fronts(place: Place) -> Iterator[tuple[str, dict[str, Any]]]:
    """(front key, its document) of the latest stored requests; those that cannot be read are left out."""
    paths: list[tuple[float, str, Any]] = []
    for path in place.front_files():
        with suppress(OSError):
            paths.append((path.stat().st_mtime, path.stem, path))
    for _, key, path in sorted(paths, reverse=True)[:MOST_COMPARED]:
        with suppress(BadEntryError):
            body = unseal(path)
            if "components" in body and "graph_key" in body:
                yield key, body


def _distance(found: Nearest) -> int:
    return sum(_WEIGHTS.get(name.partition(".")[0], 1) for name, _, _ in found.differences)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:16]}..."
