"""The page: a head, the sections, the passes with their differences. No request leaves it."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from kimigraph.report.data import PassView, ReportData, read_data
from kimigraph.report.markup import Child, Html, element, join
from kimigraph.report.tables import sections
from kimigraph.report.units import seconds

REPORT_NAME = "report.html"
LIMIT = 5_000_000
"""Bytes that a report may have."""

KEYS = (
    ("j, k", "next and previous pass"),
    ("o, Enter", "open or close this pass"),
    ("a", "open or close all passes"),
    ("u", "differences side by side or in one column"),
    ("g", "back to the top"),
    ("?", "this help"),
    ("Esc", "close"),
)
WARNING = (
    "This file contains code of the model: operators, shapes, names of weights, source paths and kernel source. "
    "It contains no weights. Share it as you would share the model's code."
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def render_report(document: dict[str, Any], dumps: Path | None = None, artifact: Path | None = None) -> str:
    """The text of ``report.html``.

    Args:
        document: the ``compile --json`` document; keys that it lacks are shown as absent.
        dumps: a directory written by ``DumpPasses``, for the pipeline and the differences.
        artifact: the artifact's directory, for the source of its kernels.
    """
    data = read_data(document, dumps, artifact)
    name = document.get("source") or "program"
    title = f"{name} {document.get('shape_key') or ''}".strip()
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"kimigraph: {title}"),
        element("style", _asset("report.css")),
    )
    body = element(
        "body",
        _header(title),
        element("main", sections(data), _passes(data)),
        _help(),
        element("script", _asset("report.js")),
    )
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def _header(title: str) -> Html:
    links = [
        element("a", text, href=f"#{anchor}")
        for anchor, text in (
            ("summary", "Summary"),
            ("pipeline", "Pipeline"),
            ("fusions", "Fusions"),
            ("kernels", "Kernels"),
            ("passes", "Passes"),
        )
    ]
    button = element("button", "? keys", type="button", id="keys", aria_label="keyboard help")
    warning = element("p", WARNING, class_="warning", role="note")
    return element("header", element("h1", title), element("nav", links, button), warning)


def _passes(data: ReportData) -> Html:
    shown = [_pass(view) for view in data.passes if view.index]
    empty = element("p", "No dumps were written: compile with --dump-passes DIR to see what each pass changed.")
    return element("section", element("h2", "Passes"), shown or empty, id="passes")


def _pass(view: PassView) -> Html:
    difference = view.difference
    counts: Child = "failed" if view.failure else "no change"
    if difference is not None:
        counts = [
            element("span", f"-{difference.removed:,}", class_="removed"),
            " ",
            element("span", f"+{difference.added:,}", class_="added"),
            f" lines in {len(difference.hunks) + difference.omitted:,} places",
        ]
    line = [f"{view.index}. ", element("code", view.text), " ", element("span", counts, class_="quiet")]
    parts: list[Child] = [element("p", f"{view.nodes:,} nodes after it, {seconds(view.seconds)}")] if view.nodes else []
    if view.failure:
        parts.append(element("p", element("strong", view.failure)))
    if difference is not None:
        parts.append(element("pre", difference.text(), class_="diff"))
        if difference.omitted:
            more = f"{difference.omitted:,} further places are left out: kimigraph dumps diff DIR {view.index}"
            parts.append(element("p", more, class_="quiet"))
    elif not view.failure:
        parts.append(element("p", "The graph is the same as before.", class_="quiet"))
    return element("details", element("summary", line), parts, class_="pass", id=f"pass-{view.index}")


def _help() -> Html:
    rows = [[element("dt", element("kbd", keys)), element("dd", text)] for keys, text in KEYS]
    closing = element("form", element("button", "close"), method="dialog")
    return element("dialog", element("h2", "Keys"), element("dl", rows), closing, id="help")


def _asset(name: str) -> Html:
    return join([Html(files("kimigraph.report").joinpath("assets", name).read_text(encoding="utf-8"))])
