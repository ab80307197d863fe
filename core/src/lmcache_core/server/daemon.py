"""The daemon's process: a Unix socket, its connections, signals, and the order in which it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import grp
import logging
import os
import resource
import signal
import socket
import stat
import threading
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import Final

from .. import __version__, wire
from ..buffers import Extent
from ..config import CacheConfig
from ..endpoints import ServerConfig
from ..errors import ConfigError
from ..gauges import GAUGES, add_plugin_gauge, add_pool_gauges
from ..local import Prefaults
from ..logs import lookup_log
from ..metrics import Metrics
from ..opening import open_pool, used_plugins
from ..scrape import HttpServer, health
from ..trace import open_daemons_trace
from .commands import Command, Commands
from .page import PageServer
from .quarantine import GRACE_S, Quarantine, open_peer_pidfd
from .session import MAX_UNSENT_NBYTES, Session, peer_of
from .starts import alone_in
from .tcp import TcpServer

log = logging.getLogger(__name__)

_RECV_NBYTES: Final = 1 << 18
_HELLO_TIMEOUT_S: Final = 5.0
_DRAIN_TIMEOUT_S: Final = 60.0
MAX_DRAINS: Final = 64
_SPARE_DESCRIPTORS: Final = 64
"""Not for connections, which take three each at most: the socket, its process, an extent on its way."""


class Daemon:
    """One pool behind one socket.  `run()` returns when `stop()` was called or SIGTERM or SIGINT came."""

    def __init__(self, config: CacheConfig, *, socket_path: Path | None = None, grace_s: float = GRACE_S) -> None:
        self._server = config.server
        self.socket_path = socket_path or config.daemon_socket
        self.metrics = Metrics()
        self._pool, self._events = open_pool(config, self.metrics, shared=True)
        try:
            self._trace = open_daemons_trace(config.trace)
        except ConfigError:
            self._pool.close()
            self._events.close()
            raise
        self._prefaults = Prefaults(nice=10)  # engines compute meanwhile
        self._pool.slab.on_grow = self._prefaults.start
        self._pool.slab.on_drop = self._extent_dropped
        add_pool_gauges(self.metrics, self._pool)
        self._pool.leases.on_lookup = lookup_log(config.log_requests)
        self.metrics.gauge("clients", GAUGES["clients"], lambda: {(): float(self._clients())})
        add_plugin_gauge(self.metrics, used_plugins(config), config.plugins.disable)
        self._sessions: dict[int, Session] = {}
        self.commands = Commands(self._pool, self.status, self.metrics.prometheus_text)
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}
        self._drains: set[asyncio.Task[None]] = set()
        self._grace_s = grace_s
        self._said_full = False
        self._next = 1
        self._began = time.monotonic()
        self._also: dict[str, str] = {}
        self.ready = asyncio.Event()

    async def run(self, *, handle_signals: bool = True) -> None:
        """Serve until told to stop, then write what is not written, end the connections and close the pool."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._stop = asyncio.Event()
        self._quarantine = Quarantine(self._pool, loop, grace_s=self._grace_s)
        if handle_signals:
            raise_descriptor_limit()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        async with contextlib.AsyncExitStack() as at_end:
            at_end.push_async_callback(loop.run_in_executor, None, self.close)
            at_end.callback(self._quarantine.close)
            http = HttpServer.start(self._server.http, health(self.metrics, self._readiness))
            if http is not None:
                at_end.callback(http.close)
            page = PageServer.start(
                self._server,
                self._pool,
                self.metrics,
                self.commands,
                clients=self._clients,
                state=lambda: {"uptime_s": self._uptime_s(), "problem": self._readiness(), "clients": self._clients()},
            )
            if page is not None:
                at_end.callback(page.close)
            tcp = await TcpServer.start(self._server.tcp, self.commands, self._pool.boot_id)
            if tcp is not None:
                at_end.push_async_callback(tcp.close)
            self._listener = bind(self.socket_path, self._server)
            self._inode = self.socket_path.lstat().st_ino
            at_end.push_async_callback(self._end_connections)
            loop.add_reader(self._listener, self._accept)
            places = (("http", http), ("page", page), ("tcp", tcp))
            also = "".join(f", {kind} {place.address}" for kind, place in places if place)
            set_nice(self._server.nice)
            log.info("serving on %s%s, boot id %s", self.socket_path, also, self._pool.boot_id)
            self._also = {kind: str(place.address) for kind, place in places if place}
            notify_systemd("READY=1")
            self.ready.set()
            await self._stop.wait()
            notify_systemd("STOPPING=1")
            log.info("stopping: writing what is not written yet, at most %.0f s", _DRAIN_TIMEOUT_S)
            self.commands.stop()
            loop.remove_reader(self._listener)
            if not await loop.run_in_executor(None, self._pool.drain, _DRAIN_TIMEOUT_S):
                log.warning("stopping without having written everything")

    async def _end_connections(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            if self.socket_path.lstat().st_ino == self._inode:  # not another daemon's by now
                self.socket_path.unlink()
        for task in [*self._tasks, *self._drains]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._drains, return_exceptions=True)
        await asyncio.sleep(0)  # the tasks' callbacks close their sockets

    def stop(self) -> None:
        """On the loop's thread."""
        self._stop.set()

    def close(self) -> None:
        """Close the pool; what `run` does at its end."""
        self._prefaults.join()
        self._pool.close()
        self._events.close()
        if self._trace is not None:
            self._trace.close()

    def status(self) -> dict[str, object]:
        """What `lmc status` shows."""
        records, in_use, used = self._pool.usage()
        return {
            "version": __version__,
            "boot_id": self._pool.boot_id,
            "pid": os.getpid(),
            "uptime_s": self._uptime_s(),
            "socket": str(self.socket_path),
            **{kind: self._also.get(kind, "") for kind in ("http", "page", "tcp")},
            "problem": self._readiness(),
            "clients": self._clients(),
            "leases": self._pool.leases.count(),
            "pins": self.commands.pins,
            "quarantined_slots": len(self._quarantine),
            "name": self._pool.name,
            "records": records,
            "records_in_use": in_use,
            "used_nbytes": used,
            "capacity_nbytes": self._pool.slab.capacity_nbytes,
            "tiers": [asdict(tier.status()) for tier in self._pool.tiers],
        }

    def _uptime_s(self) -> float:
        return round(time.monotonic() - self._began, 3)

    def _clients(self) -> int:
        """Connections of engines; whoever only gives commands is none."""
        return sum(not session.only_commands for session in list(self._sessions.values()))

    def _readiness(self) -> str:
        """ "" when the tiers are usable, else which are not."""
        down = [tier.name for tier in self._pool.tiers if not tier.ready]
        return "draining" if self.commands.draining else f"tiers down: {', '.join(down)}" if down else ""

    def _extent_dropped(self, extent: Extent) -> None:
        """From any thread, under the pool's lock."""
        self._loop.call_soon_threadsafe(self._tell_dropped, extent.extent_id)

    def _tell_dropped(self, extent_id: int) -> None:
        for session in self._sessions.values():
            session.extent_dropped(extent_id)

    def _accept(self) -> None:
        """Called when somebody waits: not a coroutine, whose cancelling could lose a socket."""
        tasks = self._tasks
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._say_full(f"no descriptor left for another connection: {error}")
                self._loop.remove_reader(self._listener)
                self._loop.call_later(0.1, self._accept_again)
            return
        sock.setblocking(False)
        if len(tasks) >= min(self._server.max_clients, max_connections()):
            reason = f"{len(tasks)} clients are connected, which is the limit"
            self._say_full(f"connections are refused: {reason}")
            with contextlib.suppress(OSError):
                sock.send(wire.encode(wire.Refused(reason)))
            sock.close()
            return
        self._said_full = False
        task = self._loop.create_task(self._serve(sock))
        tasks[task] = sock

        def ended(done: asyncio.Task[None]) -> None:
            tasks.pop(done).close()
            if not done.cancelled() and (bug := done.exception()) is not None:
                log.error("a connection ended with an error of ours", exc_info=bug)

        task.add_done_callback(ended)

    def _say_full(self, text: str) -> None:
        if not self._said_full:
            self._said_full = True
            log.warning("%s", text)

    def _accept_again(self) -> None:
        if not self._stop.is_set():
            self._loop.add_reader(self._listener, self._accept)

    async def _serve(self, sock: socket.socket) -> None:
        pid, uid, _ = peer_of(sock)
        pidfd = open_peer_pidfd(sock, pid)
        writer = Writer(sock, self._loop)
        session = Session(
            self._next,
            self._pool,
            self._loop,
            writer.send,
            lambda: self.commands.draining,
            self.metrics,
            self._trace.answered if self._trace is not None else None,
        )
        self._next += 1
        frames = wire.Frames(wire.to_daemon_decoder(), wire.MAX_HELLO_NBYTES)
        hello_by = self._loop.time() + _HELLO_TIMEOUT_S
        if pidfd is not None:  # a copy of the socket in a forked child keeps the connection open
            self._loop.add_reader(pidfd, self._exited, pidfd, sock)
        try:
            if (allowed := self._server.allowed_uids or (os.getuid(), 0)) and uid not in allowed:
                raise wire.WireError(f"uid {uid} is not among server.allowed_uids {allowed}")
            welcomed = False
            while True:
                limit = None if welcomed else hello_by - self._loop.time()
                data = await asyncio.wait_for(self._loop.sock_recv(sock, _RECV_NBYTES), limit)
                if not data:
                    return
                for message in frames.feed(data):
                    if welcomed:
                        await self._handle(session, message)
                    else:
                        self._welcome(session, message)
                        welcomed = True
                        frames.max_nbytes = wire.MAX_FRAME_NBYTES
                        self._sessions[session.number] = session
                if writer.unsent_nbytes > MAX_UNSENT_NBYTES:
                    raise wire.WireError("the client does not read its answers")
        except wire.WireError as error:
            log.warning("connection %d (pid %d) is refused: %s", session.number, pid, error)
            writer.send(wire.encode(wire.Refused(str(error))), None)
        except (OSError, TimeoutError) as error:
            log.info("connection %d (pid %d) is gone: %r", session.number, pid, error)
        finally:
            self._sessions.pop(session.number, None)
            if pidfd is not None:
                self._loop.remove_reader(pidfd)
            self._quarantine.add(session.client, list(session.close().values()), pidfd)
            await writer.close()

    def _exited(self, pidfd: int, sock: socket.socket) -> None:
        """The process that connected is gone: read what it has sent, and the end."""
        self._loop.remove_reader(pidfd)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _welcome(self, session: Session, message: wire.ToDaemon) -> None:
        if not isinstance(message, wire.Hello):
            raise wire.WireError(f"the first message is {type(message).__name__}, not Hello")
        if message.protocol != wire.PROTOCOL:
            raise wire.WireError(
                f"the client speaks protocol {message.protocol}, this daemon {wire.PROTOCOL}: "
                "upgrade lmcache-core on the older side"
            )
        session.client = message.client
        if message.quiet:
            self._quarantine.released_by(message.client)
        session.send(wire.Welcome(wire.PROTOCOL, self._pool.boot_id, os.getpid()))

    async def _handle(self, session: Session, message: wire.ToDaemon) -> None:
        if isinstance(message, wire.Drain):
            if len(self._drains) >= MAX_DRAINS:
                session.send(wire.Failed(message.call, f"{MAX_DRAINS} drains are waited for already"))
                return
            task = self._loop.create_task(self._command(session, message))
            self._drains.add(task)
            task.add_done_callback(self._drains.discard)
        elif isinstance(message, wire.Quiet):
            self._quarantine.released_by(session.client)
        elif isinstance(message, Command):
            session.only_commands = not session.is_engine
            await self._command(session, message)
        else:
            if isinstance(message, wire.Define):
                self.commands.learn(message.definition)
            session.is_engine, session.only_commands = True, False
            session.handle(message)

    async def _command(self, session: Session, command: Command) -> None:
        session.send(await self.commands.answer(command, session.chain))


class Writer:
    """Sends frames in their order, some of which carry a descriptor, without ever blocking the loop."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._sock = sock
        self._loop = loop
        self._queue: deque[tuple[bytes, int | None]] = deque()
        self._waiting = False
        self._broken = False
        self.unsent_nbytes = 0

    def send(self, data: bytes, fd: int | None) -> None:
        if self._broken:
            return
        # A copy: the extent may be dropped, and its number be another file's, before this can be sent.
        self._queue.append((data, None if fd is None else os.dup(fd)))
        self.unsent_nbytes += len(data)
        if not self._waiting:
            self._push()

    async def close(self, timeout_s: float = 1.0) -> None:
        """Give the last frames a moment to leave."""
        deadline = self._loop.time() + timeout_s
        while self._queue and not self._broken and self._loop.time() < deadline:
            await asyncio.sleep(0.01)
        self._stop()
        self._break()

    def _push(self) -> None:
        try:
            while self._queue:
                data, fd = self._queue[0]
                sent = self._sock.send(data) if fd is None else socket.send_fds(self._sock, [data], [fd])
                self.unsent_nbytes -= sent
                if fd is not None:
                    os.close(fd)
                if sent < len(data):
                    self._queue[0] = (data[sent:], None)
                else:
                    self._queue.popleft()
        except BlockingIOError:
            if not self._waiting:
                self._waiting = True
                self._loop.add_writer(self._sock, self._push)
            return
        except OSError:
            self._break()
        self._stop()

    def _break(self) -> None:
        """Nothing can be sent any more: end the connection, and with it who reads from it."""
        self._broken = True
        for _, fd in self._queue:
            if fd is not None:
                os.close(fd)
        self._queue.clear()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _stop(self) -> None:
        if self._waiting:
            self._waiting = False
            self._loop.remove_writer(self._sock)


def raise_descriptor_limit() -> None:
    """Let this process open as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def set_nice(nice: int) -> None:
    """Give the calling thread this priority, as far as the system allows it."""
    thread = threading.get_native_id()
    if nice == os.getpriority(os.PRIO_PROCESS, thread):
        return
    try:
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    except PermissionError:
        log.info("server.nice %d is not allowed here: answers may wait for busy engines", nice)


def max_connections() -> int:
    """As many as there are descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - _SPARE_DESCRIPTORS) // 3) if soft != resource.RLIM_INFINITY else 1 << 20


def bind(path: Path, server: ServerConfig) -> socket.socket:
    """Listen on `path`; a socket that nobody serves is replaced, one that is served is an error."""
    with alone_in(path.parent):
        return _bind(path, server)


def _bind(path: Path, server: ServerConfig) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() or path.is_symlink():
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(f"server.socket: {path} exists and is not a socket; remove it or name another path")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                if probe.connect_ex(str(path)) == 0:
                    raise ConfigError(f"server.socket: another daemon serves {path}; stop it or name another path")
            path.unlink()
        before = os.umask(0o777 & ~server.mode)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        path.chmod(server.mode)
        if server.socket_group:
            group = server.socket_group
            os.chown(path, -1, int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid)
        sock.listen(1024)
        sock.setblocking(False)
    except (OSError, KeyError) as error:
        sock.close()
        raise ConfigError(f"server.socket: cannot listen on {path}: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def notify_systemd(state: str) -> None:
    """Tell the service manager, where one listens."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.sendall(state.encode())
