"""A small client of the WebDriver protocol (W3C): it starts chromedriver and drives a headless Chromium."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def find_browser():
    """The paths of Chromium and of its driver; None if one of them is missing."""
    browser = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    return None if browser is None or driver is None else (browser, driver)


class Browser:
    """A session of a browser."""

    def __init__(self, *, dark=False, width=1100, height=900):
        binary, driver = find_browser()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.root = f"http://127.0.0.1:{port}"
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--window-size={width},{height}",
        ]
        arguments += ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
        options = {"binary": binary, "args": arguments}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self.session = None
        for _ in range(100):
            try:
                opened = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
                break
            except OSError:
                time.sleep(0.2)
        self.session = opened["sessionId"]
        self.prefer("prefers-color-scheme", "dark" if dark else "light")

    def _send(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.root + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.loads(reply.read())["value"]
        except urllib.error.HTTPError as problem:
            raise AssertionError(json.loads(problem.read())["value"]["message"]) from None

    def ask(self, method, path, body=None):
        return self._send(method, f"/session/{self.session}{path}", body)

    def devtools(self, command, **parameters):
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def prefer(self, name, value, media=""):
        """Emulate a preference of the reader, or a medium such as print."""
        self.devtools("Emulation.setEmulatedMedia", media=media, features=[{"name": name, "value": value}])

    def open(self, path: Path | str):
        address = path if isinstance(path, str) else path.absolute().as_uri()
        self.ask("POST", "/url", {"url": address})

    def run(self, code, *arguments):
        """The value of a function body of JavaScript."""
        return self.ask("POST", "/execute/sync", {"script": code, "args": list(arguments)})

    def find(self, selector):
        return self.ask("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def click(self, selector):
        self.ask("POST", f"/element/{self.find(selector)}/click", {})

    def type(self, selector, text):
        self.ask("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def text(self, selector):
        return self.ask("GET", f"/element/{self.find(selector)}/text")

    def press(self, key):
        keys = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": keys}]})

    def errors(self):
        """Messages of the console that are errors or warnings."""
        return [entry["message"] for entry in self.ask("POST", "/se/log", {"type": "browser"}) if entry["level"] != "INFO"]

    def screenshot(self, path: Path, *, whole=False):
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(shot))

    def pdf(self, path: Path):
        path.write_bytes(base64.b64decode(self.devtools("Page.printToPDF", printBackground=True)["data"]))

    def close(self):
        try:
            if self.session is not None:
                self.ask("DELETE", "")
        finally:
            self.process.terminate()
            self.process.wait()
