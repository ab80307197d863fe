"""The pictures of the dashboard in the documentation: `nox -s page -- --pictures` makes them anew."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from browsing import Watched, chromium, opened, running
from PIL import Image
from playwright.sync_api import sync_playwright

MINUTES = 4.0
VIEWS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1120, "height": 1240}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1120, "height": 860}},
    "phone": {
        "color_scheme": "light",
        "viewport": {"width": 390, "height": 1400},
        "is_mobile": True,
    },
}


def main() -> None:
    folder = Path(sys.argv[1])
    minutes = float(sys.argv[2]) if len(sys.argv) > 2 else MINUTES
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as temporary,
        running(Path(temporary), every_s=0.15) as found,
        sync_playwright() as playwright,
    ):
        browser = chromium(playwright)
        with opened(browser, found.url) as watched:
            watched.page.wait_for_timeout(60_000 * minutes)
        for name, settings in VIEWS.items():
            with opened(browser, found.url, **settings) as watched:
                shoot(watched, folder / f"dashboard-{name}.png")
        browser.close()


def shoot(watched: Watched, path: Path) -> None:
    watched.page.screenshot(path=path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    sys.stdout.write(f"{path}: {path.stat().st_size >> 10} KiB\n")


if __name__ == "__main__":
    main()
