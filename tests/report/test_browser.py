"""``report.html`` in headless Chromium: keys, drawing of differences, light and dark, phone width, no violations."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimigraph.ir.report import CompileReport
from kimigraph.report import render_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --virtual-time-budget=5000"
).split()
PROBE = """
<script>
const problems = [];
addEventListener("error", (event) => problems.push(event.message));
addEventListener("securitypolicyviolation", (event) => problems.push(event.violatedDirective));
const press = async (key) => {
  document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  await new Promise((done) => setTimeout(done, 60));
};
const state = () => ({
  open: passes.map((pass) => pass.open),
  here: passes.findIndex((pass) => pass.classList.contains("here")),
  help: document.getElementById("help").open,
});
const passes = [...document.querySelectorAll(".pass")];
const run = async () => { %s };
addEventListener("load", () => run().then((result) => parent.postMessage(JSON.stringify({ result, problems }), "*")));
</script>
"""
FRAME = """<!doctype html><body style="margin:0"><pre id="result"></pre><script>
addEventListener("message", (event) => { document.getElementById("result").textContent = event.data; });
</script><iframe src="page.html" style="border:0;width:{width}px;height:800px"></iframe></body>"""

LONG = "torch.ops.aten.index_put_.default(cache_3_index_key, [unsqueeze, add], layer_norm_7_with_a_long_name_in_it)"


@pytest.fixture
def page(tmp_path: Path) -> str:
    """A report of three passes; the second one has more places than are drawn at once."""
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    entries: list[dict[str, Any]] = [{"index": 0, "pass": "capture", "nodes": 400}]
    for index, name in enumerate(("first", "second", "third"), start=1):
        entries.append({"index": index, "pass": name, "nodes": 400 - index, "seconds": 0.1, "statistics": {"fused": 1}})
    (dumps / "timings.json").write_text(json.dumps({"passes": entries}))
    first = ["@@ -3,4 +3,4 @@", " kept = 1", f"-old = {LONG}", f"+new = {LONG}", "-gone = 2", " kept_too = 3"]
    (dumps / "001-first.diff").write_text("\n".join(["--- a", "+++ b", *first]) + "\n")
    many = [line for n in range(200) for line in (f"@@ -{n * 20 + 1},1 +{n * 20 + 1},1 @@", f"-a = {n}", f"+b = {n}")]
    (dumps / "002-second.diff").write_text("\n".join(["--- a", "+++ b", *many]) + "\n")
    report = CompileReport(source="tiny", shape_key="b1", target="cpu")
    miss = {"kind": "missed", "pass_name": "fuse", "node": "relu", "message": "topk: expected relu", "remedy": "do"}
    report.remarks = [{**miss, "source": "/a/long/path/" * 8 + "model.py:3", "score": 1, "matched": ["topk (topk)"]}]
    kernel = {"op": "kda_decode", "file": "kernels/kda_0.py", "bytes": 10, "flops": 10, "estimated_us": 1.0}
    report.kernels = [{**kernel, "name": f"kda_decode_{n}"} for n in range(40)]
    report.graph["estimated_us"] = 80.0
    return render_report(report.as_dict(), dumps)


@pytest.fixture
def browse(page: str, tmp_path: Path) -> Callable[..., Any]:
    """``browse(script, width, dark)`` -> what the body of an async function returns after the page has loaded."""

    def run(script: str, width: int = 1200, dark: bool = False) -> Any:
        (tmp_path / "page.html").write_text(page.replace("</body>", PROBE % script + "</body>"))
        (tmp_path / "frame.html").write_text(FRAME.replace("{width}", str(width)))
        scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        command = [str(CHROMIUM), *FLAGS, *scheme, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
        done = subprocess.run(
            [*command, f"file://{tmp_path / 'frame.html'}"], capture_output=True, text=True, timeout=120, check=False
        )
        found = re.search(r'<pre id="result">(.+?)</pre>', done.stdout, re.DOTALL)
        assert found is not None, done.stderr[-2000:]
        answer = json.loads(html.unescape(found[1]))
        assert answer["problems"] == []
        return answer["result"]

    return run


def test_keys_walk_the_passes_and_show_help(browse: Callable[..., Any]) -> None:
    steps = browse(
        """
        const seen = [];
        for (const key of ["j", "j", "k", "j", "j", "j", "o", "?", "j", "?", "g", "k"]) {
          await press(key);
          seen.push([key, state()]);
        }
        return seen;
        """
    )
    here = [step["here"] for _, step in steps]
    assert here == [0, 1, 0, 1, 2, 2, 2, 2, 2, 2, -1, 2]
    assert steps[1][1]["open"] == [True, True, False] and steps[5][1]["open"] == [True, True, True]
    assert steps[6][1]["open"] == [True, True, False], "o closes the pass"
    assert [step["help"] for _, step in steps[6:10]] == [False, True, True, False], "keys rest while help is open"


def test_a_difference_is_drawn_side_by_side(browse: Callable[..., Any]) -> None:
    found = browse(
        """
        await press("j");
        const rows = [...passes[0].querySelectorAll(".row")].map((row) => [...row.children].map((c) => c.textContent));
        const marks = [...passes[0].querySelectorAll("mark")].map((mark) => mark.textContent);
        const wide = passes[0].querySelector(".row").children;
        const beside = wide[1].getBoundingClientRect().right <= wide[3].getBoundingClientRect().left;
        await press("u");
        const single = getComputedStyle(passes[0].querySelector(".row.same .right")).display;
        return { rows, marks, beside, single };
        """
    )
    new, old = f"new = {LONG}".replace("torch.ops.", ""), f"old = {LONG}".replace("torch.ops.", "")
    assert found["rows"] == [
        ["3", "kept = 1", "3", "kept = 1"],
        ["4", old, "4", new],
        ["5", "gone = 2", "", ""],
        ["6", "kept_too = 3", "5", "kept_too = 3"],
    ]
    assert found["marks"] == ["old", "new"]
    assert found["beside"] is True and found["single"] == "none"


def test_many_places_are_drawn_in_portions(browse: Callable[..., Any]) -> None:
    counts = browse(
        """
        passes[1].open = true;
        await press("x");
        const count = () => passes[1].querySelectorAll(".hunk").length;
        const more = passes[1].querySelector("button");
        const before = [count(), more.textContent];
        more.click();
        return [...before, count(), more.hidden];
        """
    )
    assert counts == [150, "show more places (50 left)", 200, True]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_in_light_and_dark(dark: bool, browse: Callable[..., Any]) -> None:
    found = browse(
        """
        await press("j");
        const parse = (text) => text.match(/[\\d.]+/g).map(Number);
        const back = (node) => {
          for (let at = node; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            const parts = parse(colour);
            if (parts.length < 4 || parts[3] > 0) return parts;
          }
          return [255, 255, 255];
        };
        const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
          .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
          .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        const kinds = ["body", ".quiet", ".warning", "a", "th", ".remedy", ".removed", ".added", ".line",
          ".old.changed", ".new.changed", "mark", ".new mark", "button", "kbd"];
        return kinds.map((kind) => {
          const node = document.querySelector(kind);
          const pair = [light(parse(getComputedStyle(node).color)), light(back(node))].sort((a, b) => b - a);
          return [kind, (pair[0] + 0.05) / (pair[1] + 0.05), light(back(document.body))];
        });
        """,
        dark=dark,
    )
    assert [kind for kind, contrast, _ in found if contrast < 4.5] == []
    assert (found[0][2] < 0.1) is dark


@pytest.mark.parametrize("width", [390, 768, 1400])
def test_nothing_sticks_out_sideways(width: int, browse: Callable[..., Any]) -> None:
    found = browse(
        """
        await press("a");
        const page = document.documentElement;
        const hunk = passes[0].querySelector(".hunk").getBoundingClientRect();
        const columns = getComputedStyle(passes[0].querySelector(".row")).gridTemplateColumns.split(" ").length;
        return { scroll: page.scrollWidth, inner: innerWidth, hunk: hunk.right, columns };
        """,
        width=width,
    )
    assert found["inner"] == width
    assert found["scroll"] <= width and found["hunk"] <= width
    assert found["columns"] == (2 if width < 720 else 4)
