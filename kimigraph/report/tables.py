"""The sections of the report before the passes themselves: summary, pipeline, fusions, kernels."""

from typing import Any

from kimigraph.report.data import PassView, ReportData
from kimigraph.report.markup import Child, Html, element, join, number, table
from kimigraph.report.misses import MissGroup, group_misses
from kimigraph.report.units import percent, scaled, seconds

SHOWN = 12
"""Names of a list that are shown at once."""


def summary(data: ReportData) -> Html:
    """What was compiled, and what came out in a few figures."""
    document = data.document
    graph, launches = document.get("graph") or {}, document.get("launches") or {}
    timing, cache = document.get("timing") or {}, document.get("cache") or {}
    estimate, priced_for = graph.get("estimated_us"), graph.get("estimated_for") or "a device"
    rows: list[tuple[str, Child]] = [
        ("source", document.get("source")),
        ("phase", document.get("phase")),
        ("shape", document.get("shape_key")),
        ("target", document.get("target")),
        ("graph", f"{graph.get('nodes_before', 0):,} nodes before the passes, {graph.get('nodes_after', 0):,} after"),
        ("launches", f"{launches.get('before', 0):,} before, {launches.get('after', 0):,} after"),
        ("estimated step", f"{seconds(estimate / 1e6)} (cost model of {priced_for})" if estimate else None),
        ("verified", _verified(document.get("verify"))),
        ("compile time", _times(timing)),
        ("cache", " ".join(filter(None, (cache.get("status"), f"({cache['reason']})" if cache.get("reason") else "")))),
        ("artifact", document.get("artifact")),
        ("dumps", document.get("dumps")),
    ]
    facts = [[element("dt", name), element("dd", value)] for name, value in rows if value]
    return _section("summary", "Summary", element("dl", facts))


def pipeline(data: ReportData) -> Html:
    """One row a pass: time, node count, what it did."""
    if not data.passes:
        return _section("pipeline", "Pipeline", element("p", "No pass ran, or no dumps were written."))
    longest = max((view.seconds or 0 for view in data.passes), default=0) or 1
    rows: list[list[Child]] = []
    nodes: int | None = None
    for view in data.passes:
        delta = view.nodes - nodes if view.nodes is not None and nodes is not None else None
        nodes = view.nodes if view.nodes is not None else nodes
        rows.append(
            [
                number(view.index),
                element("a", element("code", view.text), href=f"#pass-{view.index}") if view.index else view.name,
                number(seconds(view.seconds)),
                _bar((view.seconds or 0) / longest) if view.index else "",
                number(f"{view.nodes:,}" if view.nodes is not None else ""),
                number(f"{delta:+,}" if delta else ""),
                _did(view),
            ]
        )
    return _section("pipeline", "Pipeline", table(("", "pass", "time", "", "nodes", "change", "did"), rows))


def fusions(data: ReportData) -> Html:
    """Hits and near misses of each rule."""
    remarks: list[dict[str, Any]] = data.document.get("remarks") or []
    entries: list[dict[str, Any]] = data.document.get("fusions") or []
    names = dict.fromkeys([*(e["rule"] for e in entries), *(r["pass_name"] for r in remarks)])
    rows: list[list[Child]] = []
    for rule in names:
        hits = [r for r in remarks if r["pass_name"] == rule and r["kind"] == "passed"]
        groups = group_misses(r for r in remarks if r["pass_name"] == rule)
        entry: dict[str, Any] = next((e for e in entries if e["rule"] == rule), {})
        count = sum(int(e["count"]) for e in entries if e["rule"] == rule) or len(hits)
        none = entry.get("reason") if not groups else None
        misses = [_miss(group) for group in groups] or element("span", none or "none", class_="quiet")
        rows.append([element("code", rule), number(count), _hits(hits), misses])
    if not rows:
        return _section("fusions", "Fusions", element("p", "No fusion pass ran."))
    return _section("fusions", "Fusions", table(("rule", "hits", "where", "near misses"), rows, class_="fusions"))


def kernels(data: ReportData) -> Html:
    """One row for all equal calls of a kernel file, with its source."""
    calls: list[dict[str, Any]] = data.document.get("kernels") or []
    if not calls:
        return _section("kernels", "Kernels", element("p", "The program launches no kernels of its own."))
    places = _places(data.document.get("remarks") or [])
    total = (data.document.get("graph") or {}).get("estimated_us")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for call in calls:
        groups.setdefault((call["file"], call["op"], call["bytes"], call["flops"]), []).append(call)
    rows: list[list[Child]] = []
    for (file, op, size, flops), same in groups.items():
        estimates = [float(call["estimated_us"]) for call in same if call.get("estimated_us") is not None]
        share = percent(sum(estimates) / total) if estimates and total else ""
        lines = dict.fromkeys(places[call["name"]] for call in same if places.get(call["name"]))
        rows.append(
            [
                [element("code", op), element("br"), _link(file, data)],
                number(len(same)),
                number(scaled(size, "B")),
                number(scaled(flops, "FLOP")),
                number(seconds(estimates[0] / 1e6) if estimates else ""),
                number([share, _bar(sum(estimates) / total) if estimates and total else None]),
                [_names([call["name"] for call in same]), [element("div", line, class_="quiet") for line in lines]],
            ]
        )
    headings = ("kernel", "calls", "bytes a call", "FLOP a call", "estimate a call", "share of the step", "nodes")
    note = "Estimates: the larger of bytes over bandwidth and FLOP over peak of one H200, at least one launch."
    return _section("kernels", "Kernels", table(headings, rows), element("p", note, class_="quiet"), _sources(data))


def quantization(data: ReportData) -> Html:
    """What the policy gave which format: one row a node and role, and what that saves. Nothing without a policy."""
    records: list[dict[str, Any]] = data.document.get("quantization") or []
    if not records:
        return join(())
    rows: list[list[Child]] = [
        [
            element("code", record["node"]),
            str(record.get("role", "")).replace("_", " "),
            f"{record['format']} group {record['group']}" if record["group"] else record["format"],
            [element("code", record["after"])] if record.get("after") else "",
            record["reason"],
        ]
        for record in records
    ]
    memory: dict[str, Any] = data.document.get("memory") or {}
    note = (
        f"Caches take {memory.get('cache_bytes_per_token', 0):,} bytes a token, "
        f"{memory.get('cache_bytes_per_token_bf16', 0):,} in bf16."
    )
    headings = ("node", "role", "format", "descriptor", "reason")
    return _section("quantization", "Quantization", table(headings, rows), element("p", note, class_="quiet"))


def _section(anchor: str, title: str, *children: Child) -> Html:
    return element("section", element("h2", title), *children, id=anchor)


def _verified(verify: dict[str, Any] | None) -> str | None:
    if not verify:
        return None
    word = "passed" if verify.get("passed") else "FAILED"
    return (
        f"{word} against {verify.get('reference')}: largest error {verify.get('max_abs_err', 0):.3g}, "
        f"relative {verify.get('max_rel_err', 0):.3g}, tolerance {verify.get('tolerance', 0):.3g}"
    )


def _times(timing: dict[str, Any]) -> str:
    plain = {name: value for name, value in timing.items() if isinstance(value, int | float) and name != "total"}
    total = timing.get("total")
    parts = ", ".join(f"{name} {seconds(value)}" for name, value in plain.items())
    return f"{seconds(total)} ({parts})" if total and parts else parts


def _did(view: PassView) -> Child:
    if view.failure:
        return element("strong", view.failure)
    done = ", ".join(f"{count:,} {name}" for name, count in view.statistics.items() if count)
    return done or ("" if view.index == 0 else "changed" if view.difference is not None else "changed nothing")


def _bar(share: float) -> Html:
    return element("span", element("span", style=f"width:{max(0.0, min(1.0, share)) * 100:.1f}%"), class_="bar")


def _hits(hits: list[dict[str, Any]]) -> Child:
    if not hits:
        return element("span", "none", class_="quiet")
    lines = dict.fromkeys(str(hit.get("source", "")) for hit in hits)
    return [_names([hit["node"] for hit in hits]), [element("div", line, class_="quiet") for line in lines]]


def _miss(group: MissGroup) -> Html:
    first, count = group.first, len(group.sites)
    sites = f"{count} sites: " if count > 1 else ""
    matched: list[str] = list(first.get("matched") or ())
    return element(
        "div",
        element("div", sites, first["message"]),
        element("div", f"at {first['node']}, {first.get('source') or 'no source line'}", class_="quiet"),
        element("div", "matched: ", ", ".join(matched[:SHOWN]), class_="quiet") if matched else None,
        element("div", "to match: ", first["remedy"], class_="remedy") if first.get("remedy") else None,
        _names([site["node"] for site in group.sites]) if count > 1 else None,
        class_="miss",
    )


def _names(names: list[str]) -> Html:
    if len(names) <= SHOWN:
        return element("div", ", ".join(names), class_="names")
    few = element("summary", f"{', '.join(names[:3])} and {len(names) - 3} more")
    return element("details", few, element("div", ", ".join(names), class_="names"))


def _link(file: str, data: ReportData) -> Html:
    """The file's name, leading to its source: a browser opens what a link leads into."""
    name = element("code", file)
    return element("a", name, href=f"#source-{list(data.kernels).index(file)}") if file in data.kernels else name


def _sources(data: ReportData) -> list[Html]:
    return [
        element(
            "details",
            element("summary", "source of ", element("code", file)),
            element("pre", text, class_="code", id=f"source-{index}"),
        )
        for index, (file, text) in enumerate(data.kernels.items())
    ]


def _places(remarks: list[dict[str, Any]]) -> dict[str, str]:
    """The model's source line of each fused node."""
    return {str(remark["node"]): str(remark.get("source", "")) for remark in remarks if remark["kind"] == "passed"}


def sections(data: ReportData) -> Html:
    """All of them."""
    return join([summary(data), pipeline(data), fusions(data), quantization(data), kernels(data)])
