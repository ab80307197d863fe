"""Batches of events to whoever subscribes, over ZeroMQ: numbered, never waited for, dropped where nobody keeps up."""

from __future__ import annotations

import itertools
import logging
from typing import Any, Final

import zmq

_log: Final = logging.getLogger(__name__)
_HIGH_WATER: Final = 1024
"""Messages kept for a subscriber that is slow; further ones are lost to it, and their numbers tell it so."""


class Publisher:
    """A PUB socket: messages of three parts, the topic, the number (8 bytes, big-endian) and the batch.

    Binds the endpoint, `tcp://127.0.0.1:5557` say; one that begins with `connect:` is connected to instead.
    """

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._topic = topic.encode()
        self._numbers = itertools.count()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set_hwm(_HIGH_WATER)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            if endpoint.startswith("connect:"):
                self._socket.connect(endpoint.removeprefix("connect:"))
            else:
                self._socket.bind(endpoint)
        except BaseException:
            self.close()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        _log.info("KV events are published on %s", self.endpoint)

    def send(self, batch: bytes) -> None:
        """Publish one batch; returns at once."""
        number = next(self._numbers)
        try:
            self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), batch), zmq.NOBLOCK)
        except zmq.Again:  # lost, as its number tells
            _log.debug("batch %d of KV events is lost: nobody keeps up", number)

    def close(self) -> None:
        """Twice is fine."""
        self._socket.close()
        self._context.term()
