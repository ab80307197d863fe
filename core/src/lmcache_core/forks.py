"""What becomes of a cache in a forked child, which has neither its threads nor, by MADV_DONTFORK, its memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def in_forked_child(self) -> None:
        """Called in the child, before anything else runs there: take no lock, touch no extent, wait for nothing."""


_alive: weakref.WeakSet[Forkable] = weakref.WeakSet()
_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def tell_of_forks(who: Forkable) -> None:
    """Call `who.in_forked_child()` in every child of this process that is forked while `who` lives."""
    _alive.add(who)


def not_for_children(mapped: mmap.mmap) -> None:
    """Keep `mapped` out of forked children, and from being unmapped there: other memory may have its address."""
    mapped.madvise(mmap.MADV_DONTFORK)
    _maps.add(mapped)


def _in_child() -> None:
    for mapped in list(_maps):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapped))
    for who in list(_alive):
        who.in_forked_child()


os.register_at_fork(after_in_child=_in_child)
