"""``kimigraph explain``: why a rule did or did not match, out of the remarks that a compilation left."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kimigraph.ir.errors import UsageError
from kimigraph.passes.registry import default_registry, unknown_name
from kimigraph.tools.publish import DOCUMENT_NAME, REMARKS_NAME

_ASSIGNED = re.compile(r"^\s*([A-Za-z_]\w*) = ", re.MULTILINE)
_PARAMETERS = re.compile(r"^def \w+\((.*?)\)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Site:
    """One place where a rule matched (``hit``) or came near.

    ``anchor`` is the node that the rule started at, ``node`` the one that it ended in: the new operator of a hit, the
    node at fault of a miss. ``reason`` says what did not match, ``matched`` what did, as ``node (operator)``, and
    ``remedy`` which change to the model or option would make the rule match.
    """

    hit: bool
    anchor: str
    node: str
    reason: str
    source: str
    module: str
    matched: tuple[str, ...]
    remedy: str
    replaced: tuple[str, ...]
    via: str
    score: int

    def names(self) -> set[str]:
        """All nodes that the site names."""
        return {self.anchor, self.node, *self.replaced, *(item.partition(" ")[0] for item in self.matched)}


@dataclass(frozen=True)
class RuleReport:
    """The sites of one rule, misses by how near they came; ``note`` says why there are none."""

    rule: str
    sites: tuple[Site, ...]
    note: str

    def as_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def explain(directory: Path, node: str | None = None, rule: str | None = None) -> list[RuleReport]:
    """The rules that ran, each with its sites, nearest miss first.

    Args:
        directory: an artifact or a dump directory.
        node: keep the sites that name this node, and the rules that have one.
        rule: keep this rule (a pass name).

    Raises:
        UsageError: the directory holds no remarks, or knows no rule or node of that name (the nearest ones are named).
    """
    remarks = _remarks(directory)
    ran = _ran(directory, remarks)
    registered = default_registry().names
    known = list(dict.fromkeys([*ran, *registered]))
    if rule is not None and rule not in known:
        raise unknown_name("rule", rule, known)
    reports = [_report(name, remarks, ran) for name in ([rule] if rule is not None else ran)]
    if node is None:
        return reports if rule is not None else [item for item in reports if item.sites or _is_fusion(item.rule)]
    named = [RuleReport(item.rule, tuple(s for s in item.sites if node in s.names()), item.note) for item in reports]
    if any(item.sites for item in named):
        return [item for item in named if item.sites]
    names = _node_names(directory) | {name for item in reports for site in item.sites for name in site.names()}
    if node not in names:
        near = get_close_matches(node, sorted(names), n=3, cutoff=0.5)
        nearest = f"the nearest names are {', '.join(near)}" if near else "no name is near; see its program.py or dumps"
        raise UsageError(f"node '{node}' is not known in {directory}; {nearest}.")
    return []


def _report(rule: str, remarks: list[dict[str, Any]], ran: list[str]) -> RuleReport:
    own = [_site(remark) for remark in remarks if remark["pass_name"] == rule and remark["kind"] != "note"]
    sites = sorted(own, key=lambda site: (site.hit, -site.score))
    note = ""
    if rule not in ran:
        note = "it did not run: the pipeline leaves it out (-O0, --passes or --disable-pass)"
    elif not sites:
        note = "nothing in the graph resembles what it looks for"
    return RuleReport(rule, tuple(sites), note)


def _site(remark: dict[str, Any]) -> Site:
    nodes = [str(name) for name in remark.get("nodes", ())]
    hit = remark["kind"] == "passed"
    anchor = nodes[0] if nodes and not hit else str(remark["node"])
    message = str(remark["message"])
    return Site(
        hit=hit,
        anchor=anchor,
        node=str(remark["node"]),
        reason=message if hit else message.removeprefix(f"{anchor}: "),
        source=str(remark.get("source", "")),
        module=str(remark.get("module", "")),
        matched=tuple(remark.get("matched", ())),
        remedy=str(remark.get("remedy", "")),
        replaced=tuple(name for name in nodes if name != remark["node"]) if hit else (),
        via=str(remark.get("via", "pattern")),
        score=int(remark.get("score", 0)),
    )


def _remarks(directory: Path) -> list[dict[str, Any]]:
    path = directory / REMARKS_NAME
    if not path.is_file():
        raise UsageError(
            f"{directory} holds no {REMARKS_NAME}: name an artifact that `kimigraph compile` wrote "
            "(without --no-report), or a directory of --dump-passes"
        )
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except ValueError as error:
        raise UsageError(f"{path} cannot be read ({error}): compile again") from error


def _ran(directory: Path, remarks: Iterable[dict[str, Any]]) -> list[str]:
    """The passes that ran, in order, as far as the directory tells."""
    names = [re.split(r"[{\s]", str(item["pass"]))[0] for item in _json(directory / "timings.json").get("passes", [])]
    names += [str(item["rule"]) for item in _json(directory / DOCUMENT_NAME).get("fusions", [])]
    names += [str(remark["pass_name"]) for remark in remarks]
    return [name for name in dict.fromkeys(names) if name != "capture"]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _is_fusion(rule: str) -> bool:
    registry = default_registry()
    return rule in registry.names and registry.load(rule).fusion


def _node_names(directory: Path) -> set[str]:
    """Every name that the dumped graphs or the program assign."""
    names: set[str] = set()
    for path in [*directory.glob("[0-9][0-9][0-9]-*.py"), *directory.glob("program.py")]:
        text = path.read_text(encoding="utf-8")
        names.update(_ASSIGNED.findall(text))
        for parameters in _PARAMETERS.findall(text):
            names.update(re.findall(r"[A-Za-z_]\w*", parameters))
    return names
