"""A real Chromium, started once, with which each test looks at a real daemon."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import feed
import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from serve import Serve, joined

WAIT_MS = 60_000


@pytest.fixture(scope="session", autouse=True)
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        # As root, in a container, Chromium has no sandbox; it opens nothing but our own page.
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@dataclass
class Watched:
    """A page that is open, and all that it asked for and complained about."""

    page: Page
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def wait(self, condition: str) -> None:
        """Until an expression of the page's own is true."""
        self.page.wait_for_function(condition, timeout=WAIT_MS)


@contextmanager
def opened(browser: Browser, url: str, **settings: Any) -> Iterator[Watched]:
    """The page in a context of its own, when it has drawn its first figures."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
    try:
        watched = Watched(context.new_page())
        watched.page.on("request", lambda request: watched.asked.append(request.url))
        watched.page.on("console", lambda message: watched.complaints.append(f"{message.type}: {message.text}"))
        watched.page.on("pageerror", lambda error: watched.complaints.append(str(error)))
        watched.page.set_default_timeout(WAIT_MS)
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
    folder: Path, *, every_s: float = 0.02, environ: dict[str, str] | None = None, **server: Any
) -> Iterator[Running]:
    """A daemon with a page, and an engine that never rests."""
    with Serve(feed.write_config(folder, **server), environ=environ) as daemon:
        where = daemon.said("page ([^ ,]+)")[1]
        stop = threading.Event()
        with joined(daemon.socket) as cache:
            engine = threading.Thread(target=feed.converse, args=(cache, stop, every_s))
            engine.start()
            try:
                yield Running(daemon, f"http://{where}/", folder)
            finally:
                stop.set()
                engine.join()
        assert daemon.stop() == 0
