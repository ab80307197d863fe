"""A real Chromium and a real daemon for it to look at."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, Playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import feed
from serve import Serve

WAIT_S = 60.0


def chromium(playwright: Playwright) -> Browser:
    """The system's, else the one that Playwright has installed."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    # As root, in a container, it has no sandbox; it opens nothing but our own page.
    return playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])


@dataclass
class Watched:
    """A page that is open, and all that it asked for and complained about."""

    page: Page
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def wait(self, condition: str) -> None:
        """Until an expression of the page's own is true.

        Asked from here: what the page may not evaluate itself, its policy also forbids a waiting browser.
        """
        deadline = time.monotonic() + WAIT_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"{condition} is not true: {self.complaints}"
            self.page.wait_for_timeout(50)


@contextmanager
def opened(browser: Browser, url: str, **settings: Any) -> Iterator[Watched]:
    """The page in a context of its own, when it has drawn its first figures."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
    try:
        watched = Watched(context.new_page())
        watched.page.on("request", lambda request: watched.asked.append(request.url))
        watched.page.on("console", lambda message: watched.complaints.append(f"{message.type}: {message.text}"))
        watched.page.on("pageerror", lambda error: watched.complaints.append(str(error)))
        watched.page.set_default_timeout(1000 * WAIT_S)
        watched.page.goto(url)
        watched.wait("document.querySelectorAll('#tiers tbody tr').length === 3")
        yield watched
    finally:
        context.close()


@dataclass(frozen=True)
class Running:
    daemon: Serve
    url: str
    folder: Path


@contextmanager
def running(
    folder: Path, *, every_s: float = 0.05, environ: dict[str, str] | None = None, **server: Any
) -> Iterator[Running]:
    """A daemon with a page, and an engine that never rests."""
    with Serve(feed.write_config(folder, **server), environ=environ) as daemon:
        where = daemon.said("page ([^ ,]+)")[1]
        command = [sys.executable, feed.__file__, str(daemon.socket), str(every_s)]
        engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert engine.stdin is not None
        assert engine.stdout is not None
        try:
            assert engine.stdout.readline() == "connected\n"
            yield Running(daemon, f"http://{where}/", folder)
        finally:
            engine.stdin.close()
            engine.stdout.close()
            assert engine.wait(60) == 0
        assert daemon.process.poll() == 0 or daemon.stop() == 0
