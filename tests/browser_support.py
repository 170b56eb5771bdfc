"""A page in headless Chromium, controlled over the debugging pipe: its log, its requests, and its layout."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import HANG, start_process, wait_until

SECONDS = HANG
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium here (`apt-get install chromium`): the page was not looked at")
    return found


class Browser:
    """One tab. Messages are JSON with a zero byte after each, on descriptors 3 and 4 of the browser."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._waiting = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._waiting:
            assert select.select([self._reading], [], [], SECONDS)[0], "the browser does not answer"
            part = os.read(self._reading, 1 << 20)
            assert part, "the browser has gone"
            self._waiting += part
        message, _, self._waiting = self._waiting.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, width: int, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        wait_until(lambda: self.ask("document.readyState + location.protocol") == "completefile:")

    def ask(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[dict[str, Any]]:
        """Console messages, exceptions and entries of the log."""
        wanted = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in wanted]

    def requests(self) -> list[str]:
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"][:100] for event in sent]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    executable = find_browser()
    from_us, to_browser = os.pipe()
    from_browser, to_us = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = (
            "--headless --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe --disable-dev-shm-usage "
            "--disable-background-networking --disable-component-update --no-pings"
        )
        child = start_process(
            ["bash", "-c", f'exec "$0" {options} --user-data-dir="$1" 3<&{from_us} 4>&{to_us}', executable, profile],
            pass_fds=(from_us, to_us),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(from_us)
        os.close(to_us)
        try:
            yield Browser(from_browser, to_browser)
        finally:
            os.close(to_browser)  # the end of the pipe ends the browser
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            os.close(from_browser)
