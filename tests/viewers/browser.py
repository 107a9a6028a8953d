"""A headless Chromium that is told what to do through two pipes, with the standard library alone."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any


def chromium() -> str | None:
    """The browser's path; None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. Nothing but this machine can be reached from it."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 1000) -> None:
        program = chromium()
        assert program is not None
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        options = (
            "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --remote-debugging-pipe "
            f"--window-size={width},{height} --user-data-dir={profile}"
        ).split()

        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash", program, *options,
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._number, self._buffer = ours_in, ours_out, 0, b""
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(self, address: str) -> None:
        """Go to a page."""
        self._call("Page.navigate", self._session, url=address)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; what it throws is an AssertionError."""
        answer = self._call("Runtime.evaluate", self._session, expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 20) -> Any:
        """The value of an expression once it is true; what a page that is not there yet throws is false."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if value := self.evaluate(f"(() => {{ try {{ return {script} }} catch {{ return false }} }})()"):
                return value
            time.sleep(0.1)
        raise AssertionError(
            f"the page is not where '{script}' holds: {self.evaluate('document.body.innerText')[:500]}"
        )

    def screenshot(self, path: Path) -> None:
        """What the page shows, as a PNG file."""
        answer = self._call("Page.captureScreenshot", self._session, format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, session: str = "", **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self) -> Any:
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)
