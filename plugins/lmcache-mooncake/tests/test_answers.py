"""What the store answers, and what that is for us."""

from __future__ import annotations

from typing import Any

import pytest
from records import empty, new_key, open_backend, record
from servers import Store

from lmcache_core import BackendError, BackendFull, BackendUnavailable, ChunkCorrupt
from lmcache_mooncake import answers


@pytest.mark.parametrize(
    ("code", "kind"),
    [(-200, BackendFull), (-800, BackendUnavailable), (-900, BackendUnavailable), (-707, BackendUnavailable)],
)
def test_trouble_that_may_pass_can_be_tried_again_and_no_room_is_told_apart(
    code: int, kind: type[BackendError]
) -> None:
    error = answers.fault(code, "get", "m:1")
    assert type(error) is kind
    assert str(code) in str(error)


@pytest.mark.parametrize("code", [-10, -400, -600, -701])
def test_what_will_not_pass_is_not_retryable(code: int) -> None:
    error = answers.fault(code, "put", "m:1")
    assert type(error) is BackendError
    assert not error.retryable


def test_a_code_that_nobody_knows_is_a_fault_that_names_it() -> None:
    assert isinstance(answers.fault(-4321, "get", "m:1"), BackendUnavailable)
    assert "-4321" in str(answers.fault(-4321, "get", "m:1"))


class Answers:
    """The client, but a read has the answer `code`."""

    def __init__(self, client: Any, code: int) -> None:
        self._client = client
        self._code = code

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return [self._code] * len(names)


@pytest.mark.parametrize(
    ("code", "result"),
    [(-704, None), (-703, None), (-712, None), (-801, ChunkCorrupt), (-707, BackendUnavailable), (2000, ChunkCorrupt)],
)
def test_an_answer_to_a_read_is_a_miss_a_corrupt_record_or_a_fault(store: Store, code: int, result: Any) -> None:
    with open_backend(store) as backend:
        key = new_key()
        backend.put(key, record(key, 1000))
        session = backend._session
        client, session._store = session._store, Answers(session._store, code)
        into = empty(1000)
        (found,) = backend.get_many([key], [into], timeout_s=10.0)
        session._store = client
        assert found is result if result is None else type(found) is result
        assert into == bytes(1000)
