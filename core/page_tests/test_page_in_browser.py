"""The page in a real browser: it draws, goes on, reads well on every screen, obeys the keyboard, asks nobody else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from browsing import Running, Watched, opened, running
from playwright.sync_api import Browser

TOKEN = "correct-horse-battery-staple"
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
TABLES = ("tiers", "gone", "requests", "slow", "tenants", "plugins")


@pytest.fixture(scope="module", autouse=True)
def busy(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("page")
    with running(folder, environ={"PAGE_TOKEN": TOKEN}, page_token="${PAGE_TOKEN}") as found:
        with opened(browser, found.url) as watched:
            full = " && ".join(f"document.querySelectorAll('#{name} tbody tr').length > 0" for name in TABLES)
            watched.wait(full)
        yield found


def test_it_draws_all_that_there_is_to_see(browser: Browser, busy: Running) -> None:
    with opened(browser, busy.url) as watched:
        watched.wait("document.querySelector('#c-hits .legend').textContent.includes('%')")
        assert watched.text("#state") == "ready"
        assert watched.page.locator("#tiers tbody th").all_inner_texts()[0].startswith("host")
        assert "%" in watched.text("#tiles > :first-child .big")
        for name in TABLES:
            assert watched.page.locator(f"#{name}").is_visible()
        assert {"hit", "part", "miss"} & set(watched.page.locator("#requests tbody td:nth-child(2)").all_inner_texts())
        assert watched.page.locator("#c-hits .plot path.s0").get_attribute("d")
        assert "Far" not in watched.text("#requests")
        assert not watched.complaints
        assert {urlsplit(url).netloc for url in watched.asked if not url.startswith("data:")} == {
            urlsplit(busy.url).netloc
        }


def test_it_goes_on_by_itself_and_stops_while_it_is_paused(browser: Browser, busy: Running) -> None:
    with opened(browser, busy.url) as watched:
        watched.wait("window.seen = window.seen || points.length, points.length > window.seen + 1")
        watched.page.get_by_role("button", name="Pause").click()
        assert watched.page.locator("#pause").get_attribute("aria-pressed") == "true"
        watched.page.wait_for_load_state("networkidle")
        before = len(watched.asked)
        watched.page.wait_for_timeout(2 * 2000)  # the browser's clock: twice as long as between two questions
        assert len(watched.asked) == before
        watched.page.get_by_role("button", name="Pause").click()
        watched.wait(f"points.length > {watched.page.evaluate('points.length')}")


def test_it_keeps_its_rows_so_that_a_readers_place_is_not_lost(browser: Browser, busy: Running) -> None:
    with opened(browser, busy.url) as watched:
        watched.page.evaluate("window.kept = [...document.querySelectorAll('#tiers tbody td')]")
        watched.wait("window.seen = window.seen || points.length, points.length > window.seen + 1")
        assert watched.page.evaluate("window.kept.length > 0 && window.kept.every((node) => node.isConnected)")


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, busy: Running) -> None:
    for settings in (PHONE, {**PHONE, "viewport": {"width": 320, "height": 568}}):
        with opened(browser, busy.url, **settings) as watched:
            watched.page.locator("summary").click()
            width = watched.page.evaluate("document.documentElement.scrollWidth")
            assert width <= settings["viewport"]["width"]
            wide = watched.page.evaluate(
                "[...document.querySelectorAll('main *')].filter((node) => !node.closest('svg, thead')"
                " && node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.outerHTML.slice(0, 80))"
            )
            assert not wide


def test_it_is_dark_where_the_reader_wants_it_dark(browser: Browser, busy: Running) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        with opened(browser, busy.url, color_scheme=scheme) as watched:
            colors = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
            seen[scheme] = [brightness(color) for color in watched.page.evaluate(colors)]
    assert seen["light"][0] > 200 > 80 > seen["light"][1]
    assert seen["dark"][0] < 80 < 200 < seen["dark"][1]


def brightness(color: str) -> float:
    return sum(map(float, color.removeprefix("rgb(").removesuffix(")").split(", "))) / 3


@pytest.mark.parametrize(
    "settings", [{"color_scheme": "light"}, {"color_scheme": "dark"}, PHONE], ids=["light", "dark", "phone"]
)
def test_it_can_be_read_by_everybody(browser: Browser, busy: Running, settings: dict[str, Any]) -> None:
    """Every rule of axe-core: names, headings, tables, contrast, landmarks, live regions."""
    with opened(browser, busy.url, **settings) as watched:
        watched.page.locator("summary").click()
        found = Axe().run(watched.page)
        said = [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found.response["violations"]]
        assert not said
        assert len(found.response["passes"]) > 20


def test_headings_captions_and_columns_say_what_there_is(browser: Browser, busy: Running) -> None:
    with opened(browser, busy.url) as watched:
        page = watched.page
        levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((node) => +node.tagName[1])")
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
        for name in TABLES:
            assert page.locator(f"#{name} caption").inner_text()
            assert page.locator(f"#{name} thead th[scope=col]").count() >= 3
            assert page.locator(f"#{name} tbody th[scope=row]").count() == page.locator(f"#{name} tbody tr").count()
        assert page.get_by_role("img", name="Hit rate in the last").count() == 1
        live = page.evaluate(
            "[...document.querySelectorAll('[aria-live],[role=status],output')].map((node) => node.id)"
        )
        assert live == ["state", "done"]  # not the figures: nobody wants to hear them every two seconds


def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(browser: Browser, busy: Running) -> None:
    with opened(browser, busy.url) as watched:
        page, walked = watched.page, []
        for _ in range(7):
            page.keyboard.press("Tab")
            walked.append(
                page.evaluate(
                    "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
                )
            )
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert walked[-1] == "BODY" or outline != "none", walked
        assert walked == ["skip", "pause", "SUMMARY", "token", "save", "drain", "BODY"]
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "now"
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        watched.wait("document.querySelectorAll('#minutes tbody tr').length > 0")
        assert watched.text("#minutes thead").split()[0] == "Until"


def test_what_comes_from_elsewhere_is_text_and_never_markup(browser: Browser, busy: Running) -> None:
    with opened(browser, busy.url) as watched:
        evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
        rows = watched.page.evaluate(
            "(text) => { table('slow', ['a'], [[text], [{ text, more: text }]]); return $('slow').innerHTML }", evil
        )
        assert "<img" not in rows
        assert "&lt;img" in rows
        assert not watched.complaints


def test_a_tier_that_fails_is_said_aloud_and_its_recovery_too(browser: Browser, tmp_path: Path) -> None:
    down = tmp_path / "down"
    with running(tmp_path) as found, opened(browser, found.url) as watched:
        down.touch()
        watched.wait("document.querySelector('#state').textContent === 'tiers down: pool'")
        watched.wait("document.querySelector('#tiers').textContent.includes('left alone')")
        assert "***@cache.internal" in watched.text("#tiers")
        assert "hunter2" not in watched.page.content()
        down.unlink()
        watched.wait("document.querySelector('#state').textContent === 'ready'")
        assert not watched.complaints


def test_a_daemon_that_ends_is_waited_for_and_another_begins_anew(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path) as found:
        port = urlsplit(found.url).port
        with opened(browser, found.url) as watched:
            boot = watched.page.evaluate("boot")
            found.daemon.stop()
            ended = watched.page.evaluate("Date.now() / 1000")
            watched.wait("document.querySelector('#state').textContent.startsWith('no answer since')")
            with running(second(tmp_path), page=f"127.0.0.1:{port}"):
                watched.wait(f"boot && boot !== '{boot}' && document.querySelector('#state').textContent === 'ready'")
                assert watched.page.evaluate("points.every((point, index) => point.number === index)")
                assert watched.page.evaluate("points[0].at") > ended


def second(folder: Path) -> Path:
    made = folder / "second"
    made.mkdir()
    return made


def test_with_the_token_a_person_drains_from_the_page(browser: Browser, busy: Running) -> None:
    with opened(browser, busy.url) as watched:
        page = watched.page
        page.get_by_label("Token of this daemon").fill("wrong")
        page.get_by_role("button", name="Write what is not written yet").click()
        watched.wait("document.querySelector('#done').textContent === 'the token is not this daemon\\'s'")
        page.get_by_label("Token of this daemon").fill(TOKEN)
        page.get_by_role("button", name="Write what is not written yet").click()
        watched.wait("/^(not )?everything/.test(document.querySelector('#done').textContent)")
        page.once("dialog", lambda dialog: dialog.dismiss())
        page.get_by_role("button", name="Drain").click()
        assert not any(url.endswith("do/drain") for url in watched.asked)
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Drain").click()
        watched.wait("document.querySelector('#state').textContent === 'draining'")
        assert refused(watched) == ["401"]


def refused(watched: Watched) -> list[str]:
    """What the browser itself complains about: the answer to the wrong token."""
    return [word for complaint in watched.complaints for word in complaint.split() if word == "401"]


def test_without_a_token_there_is_nothing_to_press(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path) as found, opened(browser, found.url) as watched:
        assert not watched.page.locator("#do").is_visible()
        assert watched.page.get_by_role("button").count() == 1
