"""Operators' commands over TCP, with TLS and a token: status, drain, clear.  No engine works that way."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import ssl
from typing import Final

from .. import wire
from ..chain import Chain
from ..endpoints import Address, TcpConfig, parse_address
from ..errors import ConfigError
from .commands import Commands

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 32
MAX_FRAME_NBYTES: Final = 64 << 10
_HELLO_TIMEOUT_S: Final = 5.0
_IDLE_TIMEOUT_S: Final = 60.0
_RECV_NBYTES: Final = 64 << 10


class TcpServer:
    """Runs on the daemon's loop."""

    def __init__(self, config: TcpConfig, commands: Commands, boot_id: str) -> None:
        self._token = config.token.encode()
        self._commands = commands
        self._boot_id = boot_id
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(cls, config: TcpConfig, commands: Commands, boot_id: str) -> TcpServer | None:
        """Serve where `config` says; nothing where it says nothing."""
        if not config.listen:
            return None
        server = cls(config, commands, boot_id)
        address, context = parse_address(config.listen), _context(config)
        timeout_s = _HELLO_TIMEOUT_S if context is not None else None
        try:
            server._server = await asyncio.start_server(
                server._connected, address.host, address.port, ssl=context, ssl_handshake_timeout=timeout_s
            )
        except OSError as error:
            raise ConfigError(f"server.tcp.listen: cannot listen on {address}: {error}") from error
        return server

    @property
    def address(self) -> Address:
        """Where it really listens."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return Address(host, port)

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > MAX_CONNECTIONS:
                raise wire.WireError(f"{MAX_CONNECTIONS} operators are connected, which is the limit")
            await self._serve(reader, writer)
        except wire.WireError as error:
            log.warning("an operator at %s is refused: %s", writer.get_extra_info("peername"), error)
            with contextlib.suppress(OSError, TimeoutError):
                await _send(writer, wire.Refused(str(error)))
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            log.debug("an operator is gone: %r", error)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = wire.Frames(wire.to_daemon_decoder(), MAX_FRAME_NBYTES)
        welcomed = False
        while data := await asyncio.wait_for(
            reader.read(_RECV_NBYTES), _IDLE_TIMEOUT_S if welcomed else _HELLO_TIMEOUT_S
        ):
            for message in frames.feed(data):
                if not welcomed:
                    self._check(message)
                    welcomed = True
                    await _send(writer, wire.Welcome(wire.PROTOCOL, self._boot_id, os.getpid()))
                elif isinstance(message, wire.Status | wire.Recall | wire.Scrape | wire.Drain | wire.Clear):
                    await _send(writer, await self._commands.answer(message, no_chain))
                else:
                    raise wire.WireError(f"{type(message).__name__} is not for TCP, which shares no memory")

    def _check(self, message: wire.ToDaemon) -> None:
        if not isinstance(message, wire.Hello) or not hmac.compare_digest(message.token.encode(), self._token):
            raise wire.WireError("the token is not this daemon's")
        if message.protocol != wire.PROTOCOL:
            raise wire.WireError(f"the client speaks protocol {message.protocol}, this daemon {wire.PROTOCOL}")


async def _send(writer: asyncio.StreamWriter, message: object) -> None:
    writer.write(wire.encode(message))
    await asyncio.wait_for(writer.drain(), _IDLE_TIMEOUT_S)


def no_chain(model: int, digests: bytes) -> Chain:
    """For `Commands.answer`, where no prompt can be named."""
    raise wire.WireError("prompts are for the Unix socket")


def _context(config: TcpConfig) -> ssl.SSLContext | None:
    if config.certificate is None or config.key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.certificate, config.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"server.tcp.certificate: cannot use {config.certificate}: {error}") from error
    return context
