"""A headless Chromium, driven over pipes by its own protocol (DevTools): no package, no port, no driver.

https://chromedevtools.github.io/devtools-protocol/ names the methods and events.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patience import Deadline, patience

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_S = 60.0
"""How long one answer may take on an idle machine."""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page; what the page and the network do is kept in `events`."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, from_us = os.pipe()
        from_browser, to_us = os.pipe()
        flags = [
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        script = f'exec "$0" "$@" 3<&{to_browser} 4>&{to_us}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, program, *flags], pass_fds=(to_browser, to_us),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(profile)},
        )  # fmt: skip
        os.close(to_browser)
        os.close(to_us)
        self._write, self._read = from_us, from_browser
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self._session = None
            self.call("Browser.close")
        os.close(self._write)
        try:
            self._process.wait(patience(60))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a method; AssertionError with the browser's own words where it fails."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._write, json.dumps(asked).encode() + b"\0")
        for message in self._messages():
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self.events.append(message)
        raise AssertionError(f"the browser ended at {method}")

    def _messages(self) -> Iterator[dict[str, Any]]:
        deadline = Deadline(ANSWER_S)
        while True:
            whole, found, rest = self._rest.partition(b"\0")
            if found:
                self._rest = rest
                yield json.loads(whole)
                continue
            if not select.select([self._read], [], [], 1.0)[0]:
                if deadline.passed():
                    raise TimeoutError("the browser does not answer")
                continue
            read = os.read(self._read, 2**20)
            if not read:
                return
            self._rest += read

    def open(self, page: Path | str, *, width: int = 1280, dark: bool = False, script: bool = True) -> None:
        """Show a file, or an address, and wait until it is laid out."""
        self.events.clear()
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        deadline = Deadline(ANSWER_S)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert not deadline.passed(), "the page does not load"
            self.events.append(next(self._messages()))

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
            mobile=False,
        )  # fmt: skip

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression, of a promise what it becomes.

        The protocol may ask also where the page may run none.
        """
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """What a console would show: errors, warnings, what the page's policy refused."""
        said = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Log.entryAdded":
                said.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled":
                said.append(str(params["args"]))
            elif event.get("method") == "Runtime.exceptionThrown":
                said.append(params["exceptionDetails"]["text"])
        return said

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]
        return list(dict.fromkeys(sent))

    def named(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader is told of."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and "role" in node
        ]

    def screenshot(self, path: Path) -> Path:
        """All of the page."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path
