"""One connection to a daemon: its socket, the extents it was given, and the questions that wait for an answer."""

from __future__ import annotations

import array
import itertools
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import numpy as np

from .. import wire
from ..buffers import populate
from ..chain import Model
from ..errors import BackendUnavailable, without_frames
from ..forks import not_for_children

_RECV_NBYTES: Final = 1 << 18
_MAX_FDS: Final = 16
_ARMED: Final = select.EPOLLIN | select.EPOLLONESHOT


class MappedExtent:
    """An extent of the daemon in our address space.  The map goes when the last view of it does."""

    __slots__ = ("address", "dropped", "extent_id", "nbytes", "view")

    def __init__(self, extent_id: int, nbytes: int, fd: int) -> None:
        self.dropped = False
        self.extent_id = extent_id
        self.nbytes = nbytes
        if os.fstat(fd).st_size < nbytes:
            raise wire.WireError(f"extent {extent_id} is smaller than {nbytes} bytes")
        mapped = mmap.mmap(fd, nbytes)
        not_for_children(mapped)
        self.view = memoryview(mapped)
        self.address = int(np.frombuffer(mapped, np.uint8).__array_interface__["data"][0])

    def prefault(self, stop: Callable[[], bool]) -> None:
        """Map every page now, which takes up to a second: not in anybody's way."""
        populate(self.view, self.address, stop)


class Link:
    """`ask` and `tell` from any thread; one reader thread calls `messages`.  Broken once, it is thrown away.

    Whoever asks receives its answer itself, if nobody else is receiving: one thread less to be scheduled on the way.
    Meanwhile the reader's wait is disarmed; it is given what is not an answer.
    """

    def __init__(
        self,
        path: Path,
        client: str,
        *,
        connect_timeout_s: float,
        send_timeout_s: float,
        quiet: bool,
        on_open: Callable[[MappedExtent], None],
    ) -> None:
        self.extents: dict[int, MappedExtent] = {}
        self._on_open = on_open
        self.broken = ""
        self.writing = 0
        """Reserved slots that copies of ours may be writing; its pool counts them."""
        self._send_lock = threading.RLock()
        self._answers: dict[int, _Answer] = {}
        self._answers_lock = threading.Lock()
        self.late: set[int] = set()
        """Questions that were given up, and are not answered yet."""
        self._models: OrderedDict[Model, int] = OrderedDict()
        self._calls = itertools.count(1)
        self._frames = wire.Frames(wire.to_client_decoder())
        self._fds: list[int] = []
        self._receiving = threading.Lock()
        """Held by the one thread that receives."""
        self._arming = threading.Lock()
        self._closed = False
        self._unclaimed: deque[wire.ToClient] = deque()
        self._trouble: Exception | None = None
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._epoll = select.epoll()
        self._poll = select.poll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            self._sock.settimeout(connect_timeout_s)
            self._sock.connect(str(path))
            try:
                self._sock.sendall(wire.encode(wire.Hello(wire.PROTOCOL, client, quiet)))
            except (BrokenPipeError, ConnectionResetError):
                pass  # it may have said why before it closed
            welcome = self._first()
            if isinstance(welcome, wire.Refused):
                raise wire.WireError(f"the daemon refuses us: {welcome.reason}")
            if not isinstance(welcome, wire.Welcome) or welcome.protocol != wire.PROTOCOL:
                raise wire.WireError(f"the daemon's first message is {type(welcome).__name__}")
            self.boot_id = welcome.boot_id
            self.daemon_pid = welcome.pid
            self._sock.settimeout(None)
            timeout = struct.pack("ll", int(send_timeout_s), int(send_timeout_s % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            self._poll.register(self._sock, select.POLLIN)
            self._epoll.register(self._wake_fd, select.EPOLLIN)
            self._epoll.register(self._sock, _ARMED)
        except BaseException:
            self._close_all()
            raise

    def model(self, model: Model) -> int:
        """The number of `model` on this connection, told to the daemon first; only while a message is built."""
        number = self._models.get(model)
        if number is None:
            number = len(self._models) + 1
            if number > wire.MAX_MODELS:
                _, number = self._models.popitem(last=False)
            self.tell(wire.Define(number, model))
            self._models[model] = number
        self._models.move_to_end(model)
        return number

    def next_call(self) -> int:
        return next(self._calls)

    def tell(self, message: object | Callable[[], object]) -> None:
        """Send without waiting for an answer; BackendUnavailable if the connection is or gets broken.

        A function is called for the message under the lock of the sender: numbers of models are what they were told.
        """
        with self._send_lock:
            if self.broken:
                raise BackendUnavailable(self.broken)
            data = wire.encode(message() if callable(message) else message)
            try:
                self._sock.sendall(data)
            except OSError as error:  # a part may have gone out: nothing more can be sent
                self.abandon(f"sending failed: {error}")
                raise BackendUnavailable(self.broken) from error

    def ask(self, call: int, message: object | Callable[[], object], timeout_s: float) -> wire.Reply:
        """The answer to a question; BackendUnavailable without one in time, which then comes out of `messages`."""
        answer = self._answers[call] = _Answer()
        deadline = time.monotonic() + timeout_s
        try:
            self.tell(message)
            self._receive_for(answer, deadline)
            if not answer.come.wait(max(0.0, deadline - time.monotonic())):
                if self._gave_up(call):
                    raise BackendUnavailable(f"no answer from the daemon in {timeout_s} s")
                answer.come.wait()  # it is just being handed over
        finally:
            self._answers.pop(call, None)
        if answer.reply is None:
            raise BackendUnavailable(self.broken or "the daemon is gone")
        if isinstance(answer.reply, wire.Failed):
            raise BackendUnavailable(answer.reply.reason)
        return answer.reply

    def messages(self) -> Iterator[wire.ToClient]:
        """Every message that nobody waits for, until the connection breaks (OSError or WireError)."""
        while True:
            while self._unclaimed:
                yield self._unclaimed.popleft()
            if self._trouble is not None:
                raise self._trouble
            for fd, _ in self._epoll.poll():
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                elif self._receiving.acquire(blocking=False):  # else whoever has it arms the wait again
                    try:
                        self._receive_some()
                    finally:
                        self._receiving.release()
                    self._arm()

    def abandon(self, reason: str) -> None:
        """Break the connection; the reader ends soon."""
        self.broken = self.broken or reason
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self, reason: str) -> None:
        """By the reader, at its end: wake who waits and give the descriptors back."""
        self.abandon(reason)
        while self._answers:
            try:
                _, answer = self._answers.popitem()
            except KeyError:
                break
            answer.come.set()
        # Nobody may be using a number that is another file's.
        with self._receiving, self._send_lock, self._arming:
            self._close_all()

    def in_forked_child(self) -> None:
        """The connection is the parent's: close our copy and leave it as it is."""
        self.broken = "this process was forked"
        self._close_all()

    def _answered(self, call: int) -> _Answer | None:
        with self._answers_lock:
            self.late.discard(call)
            return self._answers.pop(call, None)

    def _gave_up(self, call: int) -> bool:
        with self._answers_lock:
            if self._answers.pop(call, None) is None:
                return False
            self.late.add(call)
            return True

    def _close_all(self) -> None:
        self._closed = True
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._epoll.close()
        self._sock.close()
        os.close(self._wake_fd)

    def _receive_for(self, answer: _Answer, deadline: float) -> None:
        """Receive until the answer has come or the deadline has; return at once if another thread is receiving."""
        if not self._receiving.acquire(blocking=False):
            return
        try:
            if self.broken:
                return
            self._arm(0)
            while not answer.come.is_set() and (left_s := deadline - time.monotonic()) > 0:
                if self._poll.poll(1000 * left_s):
                    self._receive_some()
                    if self._unclaimed:
                        os.eventfd_write(self._wake_fd, 1)
        except (OSError, wire.WireError) as error:
            self._trouble = without_frames(error)  # they hold what is committed: memory of a daemon that is gone
        except BaseException:  # what was received is lost, and with it the place in the stream
            self._trouble = wire.WireError("interrupted while receiving")
            raise
        finally:
            if self._trouble is not None:
                os.eventfd_write(self._wake_fd, 1)
            self._receiving.release()
            self._arm()

    def _arm(self, events: int = _ARMED) -> None:
        """Have the reader woken once.  Only after `_receiving` was released: while another holds that, in vain."""
        with self._arming:
            if not self._closed:
                self._epoll.modify(self._sock, events)

    def _receive_some(self) -> None:
        """Take what is there; answers go to who waits for them, the rest to `messages`."""
        try:
            messages = self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        for message in messages:
            if isinstance(message, wire.ExtentOpened):
                self._open(message)
            elif isinstance(message, wire.Refused):
                raise wire.WireError(f"the daemon ends the connection: {message.reason}")
            elif isinstance(message, wire.Reply) and (answer := self._answered(message.call)) is not None:
                answer.reply = message
                answer.come.set()
            else:
                self._unclaimed.append(message)

    def _first(self) -> wire.ToClient:
        while True:
            for message in self._receive():
                return message

    def _receive(self, flags: int = 0) -> list[wire.ToClient]:
        size = array.array("i").itemsize
        data, ancillary, _, _ = self._sock.recvmsg(
            _RECV_NBYTES, socket.CMSG_LEN(_MAX_FDS * size), socket.MSG_CMSG_CLOEXEC | flags
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % size])
                self._fds.extend(fds)
        if not data:
            raise ConnectionResetError("the daemon closed the connection")
        return list(self._frames.feed(data))

    def _open(self, message: wire.ExtentOpened) -> None:
        if not self._fds:
            raise wire.WireError(f"extent {message.extent_id} came without its descriptor")
        fd = self._fds.pop(0)
        try:
            extent = self.extents[message.extent_id] = MappedExtent(message.extent_id, message.nbytes, fd)
            self._on_open(extent)
        finally:
            os.close(fd)


class _Answer:
    __slots__ = ("come", "reply")

    def __init__(self) -> None:
        self.come = threading.Event()
        self.reply: wire.Reply | None = None
