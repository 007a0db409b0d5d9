"""Drives a headless Chromium over its debugging pipe: no port, no driver, nothing but the browser."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

#: How long one answer may take; the first one includes the start of the browser.
ANSWER_S = 30.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "headless_shell")
_SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--disable-extensions", "--remote-debugging-pipe", "--proxy-server=127.0.0.1:9"),
)


class BrowserError(Exception):
    """The browser is missing, did not answer, or refused a command."""


def find_browser() -> str:
    """The path of a Chromium; ``BrowserError`` where there is none."""
    for name in _NAMES:
        path = shutil.which(name)
        if path:
            return path
    raise BrowserError("these tests need Chromium (Debian: apt-get install chromium); none of " + ", ".join(_NAMES))


class Page:
    """One tab: loads pages, tells what is in them and what the console said."""

    def __init__(self, into: int, out: int) -> None:
        self._into = into
        self._out = out
        self._buffer = b""
        self._last = 0
        self._session = ""
        #: What console and browser complained about, in words.
        self.complaints: list[str] = []
        self._events: list[dict[str, Any]] = []

    def attach(self) -> None:
        """Open the tab and listen to its console."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        self._last += 1
        number = self._last
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, path: Path, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """Load a file at a width in CSS pixels, in the ``light`` or ``dark`` scheme, and wait until it is there."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._note(self._receive())

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        image = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(image))

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Log.entryAdded" and parameters["entry"]["level"] in ("warning", "error"):
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{parameters['type']}: {parameters['args']}")
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {parameters['message']}")

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_S
        while b"\0" not in self._buffer:
            ready, _, _ = select([self._out], [], [], max(0.0, deadline - time.monotonic()))
            got = os.read(self._out, 1 << 20) if ready else b""
            if not got:
                raise BrowserError("the browser does not answer")
            self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A tab of a browser with an empty ``profile`` of its own; browser and helpers are gone afterwards."""
    program = find_browser()
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    # The browser reads commands from descriptor 3 and answers on 4; the shell puts our ends there.
    script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
    process = subprocess.Popen(
        ["/bin/bash", "-c", script, "bash", program, *_SWITCHES, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(theirs_in, theirs_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    page = Page(ours_in, ours_out)
    try:
        page.attach()
        yield page
    finally:
        os.close(ours_in)
        os.close(ours_out)
        try:
            process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
