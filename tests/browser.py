"""Headless Chromium, driven by its own protocol over two pipes: pages are looked at as a reader's browser shows them.

Nothing is installed for it and nothing is fetched; where no Chromium is on the machine, tests skip and say so.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-dev-shm-usage",  # small in containers
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
ANSWER_SECONDS = 60.0


def chromium() -> str:
    """Its path; skips the test where there is none."""
    for name in (os.environ.get("CHROMIUM", ""), *NAMES):
        if name and (found := shutil.which(name)):
            return found
    pytest.skip(f"needs a browser: one of {', '.join(NAMES)} on PATH, or CHROMIUM=path (Debian: chromium)")


class Browser:
    """One page of a browser. Errors of its scripts are kept in ``errors``, and requests in ``requests``."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number, self._read = 0, b""
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What the browser answers to a command of its protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + ANSWER_SECONDS
        while (answer := self._next(until)).get("id") != self._number:
            self._event(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            got = os.read(self._from, 1 << 20) if ready else b""
            if not got:
                raise RuntimeError("the browser does not answer")
            self._read += got
        first, _, self._read = self._read.partition(b"\0")
        return json.loads(first)

    def _event(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(" ".join(str(a.get("value")) for a in params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path: Path, width: int = 1280, height: int = 900, *, dark: bool = False, touch: bool = False,
             still: bool = False) -> None:  # fmt: skip
        """Show a file at so many pixels; ``still``: as who asks for reduced motion sees it."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if touch else 1,
            mobile=touch,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")
        self.js("drawn.then(() => true)")  # shared/words.js
        self.settle()

    def js(self, expression: str) -> Any:
        """The value of an expression of the page, as JSON has it; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 20.0) -> None:
        until = time.monotonic() + seconds
        while not self.js(f"Boolean({condition})"):
            if time.monotonic() > until:
                raise RuntimeError(f"not within {seconds} s: {condition}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def key(self, name: str, *, shift: bool = False) -> None:
        """Press a key, "ArrowRight" or "a", and let it go."""
        text = {"text": name} if len(name) == 1 else {"text": "\r"} if name == "Enter" else {}
        given = {"key": name, "modifiers": 8 if shift else 0}
        if name in ("Enter", "Tab"):
            given["windowsVirtualKeyCode"] = {"Enter": 13, "Tab": 9}[name]
        self.call("Input.dispatchKeyEvent", type="keyDown", **given, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)
        self.settle()

    def click(self, x: float, y: float) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)
        self.settle()

    def touch(self, *ways: list[tuple[float, float]]) -> None:
        """Fingers go these ways at once, from point to point."""
        self.call(
            "Input.dispatchTouchEvent",
            type="touchStart",
            touchPoints=[_at(w[0], i) for i, w in enumerate(ways)],
        )
        for points in list(zip(*ways, strict=True))[1:]:
            self.call(
                "Input.dispatchTouchEvent",
                type="touchMove",
                touchPoints=[_at(p, i) for i, p in enumerate(points)],
            )
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def picture(self, path: Path | None = None, *, whole: bool = False) -> bytes:
        """What is seen, as PNG; ``whole``: of the page, down to its end."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        png = base64.b64decode(shot["data"])
        if path is not None:
            path.write_bytes(png)
        return png


def _at(point: tuple[float, float], number: int) -> dict[str, float]:
    return {"x": point[0], "y": point[1], "id": number}


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, ended behind the block."""
    path = chromium()
    to_browser, its_input = os.pipe()[::-1]
    its_output, from_browser = os.pipe()[::-1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # It reads from descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{its_input} 4>&{its_output}'
        process = subprocess.Popen(
            ["bash", "-c", command, path, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(its_input, its_output),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(its_input)
        os.close(its_output)
        try:
            yield Browser(to_browser, from_browser)
        finally:
            os.close(to_browser)
            os.close(from_browser)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
