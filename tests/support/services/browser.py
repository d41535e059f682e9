"""A real browser, driven by W3C's WebDriver: Debian's Chromium, headless and with an empty profile."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from specdec.commands.up.cluster import free_port

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--window-size=1280,900",
)
_PATIENCE_S = 60.0
_WATCH = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) => window.violations.push(event.violatedDirective));
window.faults = [];
window.addEventListener('error', (event) => window.faults.push(String(event.message)));
window.addEventListener('unhandledrejection', (event) => window.faults.push(String(event.reason)));
"""
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "ArrowRight": "\ue014", "ArrowLeft": "\ue012",
        "Home": "\ue011", "End": "\ue010", "Control": "\ue009", "Space": " "}  # fmt: skip


class Browser:
    """A session with one window. Its methods wait for the browser; only `until` waits for the page."""

    def __init__(self, base_url: str, session: str) -> None:
        self._root = f"{base_url}/session/{session}"
        self._http = httpx2.Client(timeout=_PATIENCE_S)
        self.devtools("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Run a WebDriver command. Raises RuntimeError with the browser's error."""
        answer = self._http.request(method, self._root + path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        if answer.status_code != 200:
            raise RuntimeError(f"{method} {path}: {value['error']}: {value['message']}")
        return value

    def devtools(self, command: str, **params: Any) -> Any:
        """Run a command of Chrome's DevTools protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, url: str) -> None:
        """Load a page; returns when it is loaded."""
        self.call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function body in the page; returns its result."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def until(self, script: str, *arguments: Any) -> Any:
        """Wait until an expression is true in the page; returns its value."""
        end_s = time.monotonic() + _PATIENCE_S
        while not (value := self.run(f"return {script};", *arguments)):
            if time.monotonic() > end_s:
                raise TimeoutError(f"never true: {script}; the page says: {self.text('main')!r}")
        return value

    def text(self, selector: str) -> str:
        """The displayed text of an element."""
        return str(self.run("return document.querySelector(arguments[0]).innerText;", selector))

    def click(self, selector: str) -> None:
        """Click with the mouse."""
        self.call("POST", f"/element/{self._find(selector)}/click", {})

    def fill(self, selector: str, text: str) -> None:
        """Replace a field's content, as by typing."""
        found = self._find(selector)
        self.call("POST", f"/element/{found}/clear", {})
        self.call("POST", f"/element/{found}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Press keys together at the focus, and release them."""
        codes = [KEYS.get(key, key) for key in keys]
        actions = [{"type": "keyDown", "value": code} for code in codes]
        actions += [{"type": "keyUp", "value": code} for code in reversed(codes)]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def point_at(self, selector: str) -> None:
        """Move the mouse onto an element."""
        self.run("document.querySelector(arguments[0]).scrollIntoView({block: 'nearest'});", selector)
        origin = {_ELEMENT: self._find(selector)}
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": origin}
        self.call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def show_as(self, *, width: int = 1280, height: int = 900, dark: bool = False, still: bool = True) -> None:
        """Emulate a screen and its user's preferences."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.devtools("Emulation.setEmulatedMedia", media="", features=features)

    def picture(self, path: Path) -> None:
        """Write a screenshot as PNG."""
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """The page's violations of its policy and errors so far, and the browser's log since the last call."""
        logged = [entry["message"] for entry in self.call("POST", "/se/log", {"type": "browser"})]
        return [*self.run("return [...window.violations, ...window.faults];"), *logged]

    def quit(self) -> None:
        """Close the browser."""
        self.call("DELETE", "")
        self._http.close()

    def _find(self, selector: str) -> str:
        return str(self.call("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT])


@contextmanager
def browser() -> Iterator[Browser]:
    """Run Chromium with an empty profile. Needs Debian's chromium and chromium-driver (make servers)."""
    driver = shutil.which("chromedriver")
    if driver is None:
        raise FileNotFoundError("chromedriver: make servers installs it")
    port = free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        quiet = subprocess.DEVNULL
        process = subprocess.Popen([driver, f"--port={port}"], stdout=quiet, stderr=quiet, start_new_session=True)
        try:
            base_url = f"http://127.0.0.1:{port}"
            _wait_for(base_url, process)
            options = {"args": [*_FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "WARNING"}}
            body = {"capabilities": {"alwaysMatch": wanted}}
            answer = httpx2.post(f"{base_url}/session", json=body, timeout=_PATIENCE_S).json()["value"]
            if "sessionId" not in answer:
                raise RuntimeError(f"no browser: {answer}")
            one = Browser(base_url, answer["sessionId"])
            try:
                yield one
            finally:
                one.quit()
        finally:
            # The whole group, because a browser that did not quit would outlive its driver.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_for(base_url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if httpx2.get(f"{base_url}/status", timeout=_PATIENCE_S).json()["value"]["ready"]:
                return
        except httpx2.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError("chromedriver does not start")
