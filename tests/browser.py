"""A page in headless Chromium, by its debugging protocol."""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, "c": 67}


class Page:
    def __init__(self, socket: ClientConnection):
        self.socket, self.numbers = socket, itertools.count(1)
        self.errors: list[str] = []
        """Errors that scripts of the page have raised."""
        self.call("Runtime.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while (answer := json.loads(self.socket.recv(30))).get("id") != number:
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(answer["params"]["exceptionDetails"]))
        assert "error" not in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression, as JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            code = CODES[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)


@contextlib.contextmanager
def opened(file: Path, profile: Path) -> Iterator[Page]:
    """Open the page of a file; skips the test where no browser is installed, unless BROWSER_REQUIRED is set."""
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if binary is None:
        assert "BROWSER_REQUIRED" not in os.environ
        pytest.skip("Chromium is not installed")
    command = [binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    process = subprocess.Popen([*command, f"--user-data-dir={profile}", file.as_uri()], stderr=subprocess.DEVNULL)
    try:
        with connect(_debugger(profile / "DevToolsActivePort", file.as_uri()), max_size=None) as socket:
            page, deadline = Page(socket), time.monotonic() + 60
            while page.value("document.readyState") != "complete":
                assert time.monotonic() < deadline, "the page does not load"
                time.sleep(0.1)
            yield page
    finally:
        process.terminate()
        process.wait(30)


def _debugger(said: Path, address: str) -> str:
    """Address of the page's debugger; `said` is where Chromium writes its port."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            port = int(said.read_text().split()[0])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10) as answer:
                pages = json.load(answer)
            return next(str(one["webSocketDebuggerUrl"]) for one in pages if one["url"] == address)
        time.sleep(0.2)
    raise AssertionError("Chromium has not opened the page")
