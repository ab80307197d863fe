"""The page of a daemon: one HTML file, the JSON that it draws, and, with a token, what may be asked of the daemon.

Whoever can open a port on loopback may look.  A web page from elsewhere may not, though the same browser shows it: not
through a name that it points at 127.0.0.1 (Host), not as a request across origins (Origin, Sec-Fetch-Site).
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, urlsplit

from .. import wire
from ..endpoints import ServerConfig
from ..metrics import Metrics
from ..pool import Pool
from ..scrape import Answer, HttpServer, Request
from .commands import Commands
from .overview import Overview
from .samples import Samples
from .tcp import no_chain

log = logging.getLogger(__name__)

FILE: Final = Path(__file__).with_name("page.html")
ACTION_TIMEOUT_S: Final = 60.0
JSON: Final = "application/json"
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?")
_ALWAYS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_ACTIONS: Final = {"/do/save": False, "/do/drain": True}
"""Whether new stores are refused from then on."""


class PageServer:
    """The page at its address, and the thread that samples for it."""

    def __init__(self, samples: Samples, http: HttpServer) -> None:
        self._samples = samples
        self._http = http
        self.address = http.address
        samples.start()

    @classmethod
    def start(
        cls,
        config: ServerConfig,
        pool: Pool,
        metrics: Metrics,
        commands: Commands,
        *,
        clients: Callable[[], int],
        state: Callable[[], dict[str, object]],
    ) -> PageServer | None:
        """Serve where `config` says, from the daemon's loop; nothing where it says nothing."""
        loop = asyncio.get_running_loop()

        def act(refuse_new: bool) -> bool:
            answer = commands.answer(wire.Drain(0, ACTION_TIMEOUT_S, refuse_new), no_chain)
            reply = asyncio.run_coroutine_threadsafe(answer, loop).result()
            return isinstance(reply, wire.Count) and bool(reply.count)

        def stated() -> dict[str, object]:
            return {**state(), "actions": bool(config.page_token)}

        samples = Samples(pool, metrics, clients)
        page = Page(samples, Overview(pool, metrics, samples, state=stated).encoded, token=config.page_token, act=act)
        http = HttpServer.start(config.page, page.respond, "server.page")
        return cls(samples, http) if http is not None else None

    def close(self) -> None:
        self._samples.close()
        self._http.close()


class Page:
    """Thread-safe.  `act(refuse_new)` drains and says whether everything was written."""

    def __init__(
        self, samples: Samples, overview: Callable[[], bytes], *, token: str, act: Callable[[bool], bool]
    ) -> None:
        self._samples = samples
        self._overview = overview
        self._token = token.encode()
        self._act = act

    def respond(self, request: Request) -> Answer:
        headers = {name.lower(): value for name, value in request.headers.items()}
        url = urlsplit(request.target)
        problem = refusal(headers, opens=request.method == "GET" and url.path == "/")
        if problem:
            return _plain(403, problem)
        if request.method == "POST":
            return self._do(url.path, headers)
        if url.path == "/":
            html, policy = document()
            return Answer(200, html, "text/html; charset=utf-8", {**_ALWAYS, "Content-Security-Policy": policy})
        if url.path == "/data.json":
            return Answer(200, self._data(url.query), JSON, _ALWAYS)
        return _plain(404, "there is / and /data.json")

    def _data(self, query: str) -> bytes:
        """This moment, and the points after the one that is asked for."""
        asked = parse_qs(query).get("after", ["-1"])[0]
        after = int(asked) if re.fullmatch(r"[0-9]{1,15}", asked) else -1
        return b'{"overview":%b,"points":[%b]}' % (self._overview(), b",".join(self._samples.after(after)))

    def _do(self, path: str, headers: Mapping[str, str]) -> Answer:
        if path not in _ACTIONS:
            return _plain(404, "there is /do/save and /do/drain")
        if not self._token:
            return _plain(403, "the page only shows: server.page_token is not configured")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._token):
            log.warning("the page was asked to %s without the right token", path.rpartition("/")[2])
            return _plain(401, "the token is not this daemon's", {"WWW-Authenticate": "Bearer"})
        done = self._act(_ACTIONS[path])
        return Answer(200, b'{"done":%b}' % (b"true" if done else b"false"), JSON, _ALWAYS)


def refusal(headers: Mapping[str, str], *, opens: bool = False) -> str:
    """Why a request is not answered, "" if it is.  To open the page, a link elsewhere may lead here."""
    host = headers.get("host", "")
    if not is_local(host):
        return "this page answers to localhost and loopback addresses only; forward a port to it"
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"http://{host.lower()}":
        return "another page has no business here"
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not opens:
        return "another page has no business here"
    return ""


def is_local(host: str) -> bool:
    """Whether a Host header names this machine: any other name may be one that somebody points at 127.0.0.1."""
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    if (match[2] or "").lower() == "localhost":
        return True
    try:
        return ip_address(match[1] or match[2]).is_loopback
    except ValueError:
        return False


@cache
def document() -> tuple[bytes, str]:
    """The HTML, and the policy that lets a browser run what is in it and nothing else."""
    html = FILE.read_text(encoding="utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), policy


def _plain(code: int, text: str, more: Mapping[str, str] | None = None) -> Answer:
    return Answer(code, f"{text}\n".encode(), headers={**_ALWAYS, **(more or {})})
