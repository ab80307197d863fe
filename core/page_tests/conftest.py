"""A real Chromium, started once, with which each test looks at a real daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browsing import chromium
from playwright.sync_api import Browser, sync_playwright


@pytest.fixture(scope="session", autouse=True)
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = chromium(playwright)
        yield started
        started.close()
