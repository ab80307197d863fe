"""A large record read piece by piece: the server never holds a copy of it, and other callers are served in between."""

from __future__ import annotations

import logging
from typing import Final

from .wire import Answer, Link, Oversize, ProtocolError, ServerError, command

logger = logging.getLogger(__name__)

_END: Final = command(b"MULTI") + command(b"EXEC")
_UNWATCH: Final = command(b"UNWATCH")


class SlicedReader:
    """Reads values by GETRANGE.  Thread-safe.

    WATCH before and an empty transaction after tell whether all pieces are of one value; if not, it is read whole.
    """

    def __init__(self, name: str, slice_nbytes: int) -> None:
        self._name = name
        self._slice_nbytes = slice_nbytes
        self._refused = False

    def wants(self, nbytes: int) -> bool:
        """Whether a value of up to `nbytes` is worth it."""
        return bool(self._slice_nbytes) and not self._refused and nbytes >= 2 * self._slice_nbytes

    def read(self, link: Link, name: bytes, into: memoryview) -> Answer:
        """What GET would answer.  Whatever was asked for on `link` has been read at the end, unless this raises."""
        step = self._slice_nbytes
        link.send([command(b"WATCH", name), command(b"STRLEN", name), _range(name, 0, step)])
        watched, nbytes = link.read(), link.read()
        for answer in (watched, nbytes):
            if isinstance(answer, ServerError):
                _pass_over(link, into)
                return self._instead(answer, link, name, into)
        if watched != "OK" or type(nbytes) is not int:
            raise ProtocolError(f"{str(watched)[:32]!r}, {str(nbytes)[:32]!r} where OK and a length are expected")
        if not 0 < nbytes <= len(into):
            _pass_over(link, into)
            _unwatch(link)
            return Oversize(nbytes) if nbytes else _whole(link, name, into)  # absent, or there and empty
        starts = range(0, nbytes, step)
        for index, start in enumerate(starts):
            for following in starts[index + 1 : index + 2]:  # the server makes it ready while this one comes
                link.send([_range(name, following, step)])
            part = into[start : min(start + step, nbytes)]
            answer = link.read(part)
            if answer != len(part):
                for _ in starts[index + 1 : index + 2]:
                    _pass_over(link, into)
                return self._instead(answer, link, name, into)
        link.send([_END])
        begun, ended = link.read(), link.read()
        if isinstance(begun, ServerError):
            return self._instead(begun, link, name, into)
        if ended not in ([], None):
            raise ProtocolError(f"{str(ended)[:100]!r} where an empty list is expected")
        return nbytes if ended == [] else _whole(link, name, into)

    def _instead(self, answer: Answer, link: Link, name: bytes, into: memoryview) -> Answer:
        """The answer after a piece that was none: of an error, itself, unless GET may be allowed; else the record."""
        _unwatch(link)
        if isinstance(answer, ServerError):
            if answer.code != "NOPERM" and not answer.text.lower().startswith("err unknown command"):
                return answer
            if not self._refused:
                self._refused = True
                logger.warning("%s: records are read whole, not in pieces: %s", self._name, answer.text)
        return _whole(link, name, into)


def _pass_over(link: Link, into: memoryview) -> None:
    """A piece that nobody wants any more; nothing is written."""
    link.read(into[:0])


def _whole(link: Link, name: bytes, into: memoryview) -> Answer:
    link.send([command(b"GET", name)])
    return link.read(into)


def _range(name: bytes, start: int, nbytes: int) -> bytes:
    return command(b"GETRANGE", name, b"%d" % start, b"%d" % (start + nbytes - 1))


def _unwatch(link: Link) -> None:
    link.send([_UNWATCH])
    link.read()
