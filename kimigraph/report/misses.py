"""Equal misses of many layers as one: what differs between layers is the number behind a node's name."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"(?<=[a-z])_\d+\b|(?<=layers[._])\d+|(?<=cache_)\d+|(?<=state_)\d+")


@dataclass(frozen=True)
class MissGroup:
    """Missed remarks of one rule that say the same at the same source line; ``first`` is the nearest of them."""

    first: dict[str, Any]
    sites: tuple[dict[str, Any], ...]


def unnumbered(text: str) -> str:
    """The text without the numbers that tell layers apart."""
    return _NUMBER.sub("", text)


def group_misses(remarks: Iterable[dict[str, Any]]) -> list[MissGroup]:
    """The missed remarks among ``remarks``, nearest first."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for remark in remarks:
        if remark["kind"] == "missed":
            message = unnumbered(str(remark["message"]))
            groups.setdefault((str(remark["pass_name"]), message, str(remark.get("source", ""))), []).append(remark)
    found = [MissGroup(max(sites, key=_score), tuple(sites)) for sites in groups.values()]
    return sorted(found, key=lambda group: -_score(group.first))


def _score(remark: dict[str, Any]) -> int:
    return int(remark.get("score", 0))
