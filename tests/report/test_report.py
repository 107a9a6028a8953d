"""``report.html``: what it says, that nothing of a model becomes markup, and that it stays small."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kimigraph.ir.report import CompileReport
from kimigraph.report import render_report
from kimigraph.report.data import DIFFERENCES
from kimigraph.report.hunks import read_difference
from kimigraph.report.markup import Html, element
from kimigraph.report.page import LIMIT

HOSTILE = "<script>alert('x')</script>\"&"


class Page(HTMLParser):
    """Tags in order, attributes by tag, and the text between them; script and style apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._open):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def remark(kind: str, node: str, message: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "pass_name": "fuse-it", "node": node, "message": message, "source": "model.py:7", **more}


@pytest.fixture
def document() -> dict[str, Any]:
    report = CompileReport(source="tiny", target="cpu", shape_key="b1", report="r")
    report.graph = {"nodes_before": 9, "nodes_after": 4, "estimated_us": 100.0}
    kernel = {"op": "lightning_indexer", "file": "kernels/li_0.py", "bytes": 4_300_000, "flops": 2_000, "replaces": []}
    report.kernels = [{**kernel, "name": f"li_{n}", "estimated_us": 10.0} for n in range(2)]
    report.fusions = [{"rule": "fuse-it", "via": "pattern", "count": 2, "nodes": ["li_0", "li_1"], "reason": ""}]
    miss = {"score": 3, "matched": ["topk_1 (topk)", "relu_1 (relu)"], "remedy": "put relu there"}
    report.remarks = [
        remark("passed", "li_0", "a became li_0"),
        remark("passed", "li_1", "b became li_1"),
        remark("missed", "sigmoid_1", "topk_1: expected relu", **miss),
        remark("missed", "sigmoid_2", "topk_2: expected relu", **{**miss, "score": 2}),
    ]
    return report.as_dict()


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    entries = [
        {"index": 0, "pass": "capture", "nodes": 9},
        {
            "index": 1,
            "pass": "tidy{deep=true}",
            "nodes": 7,
            "seconds": 0.25,
            "modified": True,
            "statistics": {"merged": 2},
        },
        {"index": 2, "pass": "fuse-it", "nodes": 7, "seconds": 0.5, "modified": False, "statistics": {}},
    ]
    (tmp_path / "timings.json").write_text(json.dumps({"passes": entries}))
    lines = [
        "--- a",
        "+++ b",
        "@@ -10,3 +10,2 @@",
        " x = 1",
        "-y = torch.ops.aten.neg.default(x)  # <b>",
        "-z = 3",
        "+z = 4",
    ]
    (tmp_path / "001-tidy.diff").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_the_page_says_what_happened(document: dict[str, Any], dumps: Path, tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/li_0.py").write_text("def launch(): ...  # a < b\n")
    page = Page(render_report(document, dumps, tmp_path))
    for part in (
        "9 nodes before the passes, 4 after",
        "tidy{deep=true}",
        "2 merged",
        "250.0 ms",
        "-2",
        "changed nothing",
    ):
        assert part in page.words, part
    assert "2 sites: topk_1: expected relu" in page.words and "put relu there" in page.words
    assert "matched: topk_1 (topk), relu_1 (relu)" in page.words and "at sigmoid_1, model.py:7" in page.words
    assert "4.3 MB" in page.words and "20.0 %" in page.words and "def launch(): ... # a < b" in page.words
    assert "y = aten.neg.default(x) # <b>" in page.words and "-2 +1 lines in 1 places" in page.words
    assert "contains code of the model" in page.words


def test_nothing_is_fetched(document: dict[str, Any], dumps: Path) -> None:
    text = render_report(document, dumps)
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "embed", "base", "video", "audio"} & set(page.tags)
    targets = [value for _, name, value in page.attributes if name in ("src", "href", "action", "data", "srcset")]
    assert targets and all(value is not None and value.startswith("#") for value in targets)
    assert not re.search(r"url\(|@import|https?://|fetch\(|XMLHttp|import\(", text)
    policy = next(
        value for tag, name, value in page.attributes if tag == "meta" and name == "content" and "src" in str(value)
    )
    assert policy is not None and policy.startswith("default-src 'none'")


def test_nothing_of_a_model_becomes_markup(document: dict[str, Any], dumps: Path, tmp_path: Path) -> None:
    plain = Page(render_report(document, dumps)).tags

    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poison(item) for key, item in value.items()}
        if isinstance(value, list):
            return [poison(item) for item in value]
        return value + HOSTILE if isinstance(value, str) and value not in ("passed", "missed") else value

    entries = json.loads((dumps / "timings.json").read_text())["passes"]
    entries = [{**entry, "pass": entry["pass"] + "{x='" + HOSTILE + "'}"} for entry in entries]
    (dumps / "timings.json").write_text(json.dumps({"passes": entries}))
    (dumps / "001-tidy.diff").write_text("--- a\n+++ b\n@@ -1,1 +1,1 @@\n-" + HOSTILE + "\n+</pre>" + HOSTILE + "\n")
    text = render_report(poison(document), dumps, tmp_path)
    assert Page(text).tags == plain
    assert HOSTILE not in text and "alert(" in text and "</pre>&lt;script" not in text


def test_the_names_of_many_layers_fold(document: dict[str, Any]) -> None:
    document["remarks"] = [remark("passed", f"li_{n}", "became") for n in range(60)]
    document["kernels"] = [{**document["kernels"][0], "name": f"li_{n}"} for n in range(60)]
    page = Page(render_report(document))
    assert "li_0, li_1, li_2 and 57 more" in page.words


def test_an_empty_document_is_a_page_too() -> None:
    page = Page(render_report(CompileReport().as_dict()))
    assert "No fusion pass ran." in page.words and "launches no kernels of its own" in page.words
    assert "--dump-passes" in page.words


def test_a_failed_pass_is_shown(document: dict[str, Any], dumps: Path) -> None:
    entries = json.loads((dumps / "timings.json").read_text())["passes"]
    entries[2] = {"index": 2, "pass": "fuse-it", "failed": "CompileError: it broke"}
    (dumps / "timings.json").write_text(json.dumps({"passes": entries}))
    assert "CompileError: it broke" in Page(render_report(document, dumps)).words


def test_a_verification_that_failed_stands_out(document: dict[str, Any]) -> None:
    document["verify"] = {"passed": False, "reference": "eager", "max_abs_err": 1, "max_rel_err": 2, "tolerance": 0.1}
    assert "FAILED against eager: largest error 1, relative 2, tolerance 0.1" in Page(render_report(document)).words


def test_large_differences_are_cut_and_say_so(document: dict[str, Any], dumps: Path) -> None:
    lines = ["--- a", "+++ b"]
    for number in range(0, 60_000, 20):
        lines += [f"@@ -{number},1 +{number},1 @@", "-" + "x" * 900, "+" + "y" * 900]
    (dumps / "001-tidy.diff").write_text("\n".join(lines) + "\n")
    text = render_report(document, dumps)
    assert DIFFERENCES * 0.9 < len(text.encode()) < LIMIT
    left = re.search(r"([\d,]+) further places are left out: kimigraph dumps diff DIR 1", text)
    assert left is not None and int(left[1].replace(",", "")) > 1000


# Differences ---------------------------------------------------------------------------------------------------------


def hunk(*lines: str, old: int = 5, new: int = 5) -> str:
    return "\n".join(["--- a", "+++ b", f"@@ -{old},9 +{new},9 @@", *lines]) + "\n"


def test_lines_that_only_free_other_names_are_unchanged() -> None:
    found = read_difference(hunk("-a = f(x); del x  # t", "-gone = 1", "+a = f(x)  # t", " b = 2"))
    assert [h.lines for h in found.hunks] == [(" a = f(x)  # t", "-gone = 1", " b = 2")]
    assert (found.removed, found.added) == (1, 0)


def test_a_hunk_of_such_lines_alone_vanishes() -> None:
    assert read_difference(hunk("-a = f(x); del x", "+a = f(x)")).hunks == ()


def test_hunks_are_cut_and_count_lines() -> None:
    same = [f" line {n}" for n in range(20)]
    found = read_difference(hunk(" a", "-b", *same, "+c", " d", old=11, new=21))
    first, second = found.hunks
    assert (first.old, first.new, first.lines) == (11, 21, (" a", "-b", " line 0", " line 1", " line 2"))
    assert (second.old, second.new) == (30, 39)
    assert second.lines == (" line 17", " line 18", " line 19", "+c", " d")
    assert second.text().splitlines()[0] == "@@ -30,4 +39,5 @@"


def test_elements_escape_what_is_not_markup() -> None:
    assert element("p", "<", Html("<br>"), [1, None, "&"], title='"', open=True, hidden=False) == (
        '<p title="&quot;" open>&lt;<br>1&amp;</p>'
    )
