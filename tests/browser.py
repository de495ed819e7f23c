"""A real browser without a window, with scripts off, spoken to through its debugging pipe. Standard library only."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

#: The names that distributions give it.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)

_PATIENCE_S = 60


class Browser:
    """One browser, one tab. Scripts of a page are off; `evaluate` asks from outside of the page."""

    def __init__(self, profile: Path) -> None:
        assert FOUND is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # It reads from descriptor 3 and writes to 4.
        script = f'exec 3<&{to_read} 4>&{to_write}; exec "$0" "$@"'
        flags = (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-extensions", "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        )  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", script, FOUND, *flags, "about:blank"],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._count, self._rest, self.heard = 0, b"", list[dict[str, Any]]()
        target = next(
            one for one in self._ask("Target.getTargets")["targetInfos"] if one["type"] == "page"
        )  # the tab it opened with
        self._session: str | None = self._ask(
            "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
        )["sessionId"]
        for method in ("Page.enable", "Network.enable", "Log.enable"):
            self.tell(method)
        self.tell("Emulation.setScriptExecutionDisabled", value=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = None
        try:
            self._ask("Browser.close")
        except (OSError, AssertionError):
            self._process.kill()
        self._process.wait(30)
        os.close(self._write)
        os.close(self._read)

    _session: str | None = None

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol to the tab, and its answer."""
        return self._ask(method, params)

    def open(self, path: Path, width: int, *, dark: bool = False, paper: bool = False) -> None:
        """A file in a window, or on a sheet, of so many pixels, once it has been drawn."""
        self.heard.clear()
        self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.tell("Emulation.setEmulatedMedia", media="print" if paper else "screen", features=scheme)
        self.tell("Page.navigate", url=path.resolve().as_uri())
        self._until("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """What an expression is, asked from outside of the page."""
        answer = self.tell("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page, as a picture."""
        data = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    @property
    def asked_for(self) -> list[str]:
        """Addresses that the page had the browser ask for, itself among them."""
        return [
            one["params"]["request"]["url"] for one in self.heard if one.get("method") == "Network.requestWillBeSent"
        ]

    def _ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params or {}}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        number = self._count
        while True:
            heard = self._hear()
            if heard.get("id") == number:
                assert "error" not in heard, (method, heard["error"])
                return dict(heard["result"])

    def _until(self, event: str) -> None:
        while not any(one.get("method") == event for one in self.heard):
            self._hear()

    def _hear(self) -> dict[str, Any]:
        """The next message; kept, if nobody asked for it."""
        end = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0], "the browser is silent"
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has gone"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(line)
        if "id" not in heard:
            self.heard.append(heard)
        return heard
