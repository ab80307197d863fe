"""The law over histories: whatever is done to a backend, in whatever order, it may forget, but it may never lie.

Hypothesis makes the histories up, the same ones each time; each answer is compared with a dict.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ..backend import GetResult
from ..errors import ChunkCorrupt
from ..keys import ChunkKey
from .bench import BackendBench, BackendSubject, Open, verdict
from .laws import LawBroken, expect, law, skip

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

_SIZES: Final = (1, 700, 4096, 20_000)


class HistoryLaws(BackendSubject):
    """What holds for a backend over many calls."""

    histories: ClassVar[tuple[tuple[int, int], ...]] = ((60, 8), (20, 40))
    """(how many, of how many steps); fewer for a store that takes long.  Short ones first, since a failure in one of
    them need not be shortened."""

    @law(since=(1, 0))
    def test_any_history_may_forget_but_never_lies(self) -> None:
        if importlib.util.find_spec("hypothesis") is None:
            skip("hypothesis is not installed (it comes with lmcache-core[testing])")
        from hypothesis import HealthCheck, Phase, settings
        from hypothesis.reporting import with_reporter
        from hypothesis.stateful import run_state_machine_as_test

        machine = backend_machine(self.open_backend)
        for count, steps in self.histories:
            check = settings(
                max_examples=count,
                stateful_step_count=steps,
                derandomize=True,
                database=None,
                deadline=None,
                print_blob=False,
                phases=[Phase.generate],  # shortening takes minutes on a store that is far away
                suppress_health_check=list(HealthCheck),
            )
            said: list[object] = []
            try:
                with with_reporter(said.append):
                    run_state_machine_as_test(machine, settings=check)
            except Exception as error:
                history = [*getattr(error, "__notes__", ()), *said]
                raise LawBroken("\n".join([f"{type(error).__name__}: {error}", *map(str, history)])) from error


def backend_machine(open_backend: Open) -> type[RuleBasedStateMachine]:
    """A Hypothesis state machine over the backend, for a test-suite that wants more or longer histories.

    `open_backend` is as for the laws: of a persistent or shared backend every call opens the same store.
    """
    from hypothesis import strategies
    from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

    indices = strategies.integers(0, len(_SIZES) - 1)
    several = strategies.lists(indices, min_size=1, max_size=3, unique=True)

    class BackendMachine(RuleBasedStateMachine):
        """`stored` has the records that may be there; one that is not in it must not be."""

        def __init__(self) -> None:
            super().__init__()
            self.bench = BackendBench(open_backend)
            self.keys = self.bench.keys(len(_SIZES))
            self.sizes = [self.bench.size(nbytes) for nbytes in _SIZES]
            self.stored: set[ChunkKey] = set()
            self.traits = self.bench.backend.traits

        @property
        def backend(self) -> Any:
            return self.bench.backend

        @rule(index=indices)
        def put(self, index: int) -> None:
            self.bench.put(self.keys[index], self.sizes[index])
            self.stored.add(self.keys[index])

        @rule(chosen=several)
        def put_many(self, chosen: list[int]) -> None:
            keys = [self.keys[index] for index in chosen]
            data = [self.bench.record(self.keys[index], self.sizes[index]) for index in chosen]
            self.stored.update(keys)
            self.backend.put_many(keys, data, timeout_s=10.0)

        @rule(index=indices)
        def get(self, index: int) -> None:
            into = self.bench.buffer(self.sizes[index])
            self._expect_truth(index, into, self.backend.get(self.keys[index], into), "get")

        @rule(chosen=several)
        def get_many(self, chosen: list[int]) -> None:
            into = [self.bench.buffer(self.sizes[index]) for index in chosen]
            results = self.backend.get_many([self.keys[index] for index in chosen], into, timeout_s=10.0)
            for index, buffer, result in zip(chosen, into, results, strict=True):
                self._expect_truth(index, buffer, result, "get_many")

        @rule(index=indices)
        def get_into_too_short_a_buffer(self, index: int) -> None:
            nbytes = self.sizes[index] - self.bench.alignment
            if nbytes > 0:
                try:
                    found = self.backend.get(self.keys[index], self.bench.buffer(nbytes))
                except ChunkCorrupt:
                    found = "refused"
                    expect(self.keys[index] in self.stored, "a record that is not there was refused as too long")
                expect(found in (None, "refused"), f"get into too short a buffer returned {found!r}")

        @rule(index=indices)
        def remove(self, index: int) -> None:
            removed = self.backend.remove(self.keys[index])
            expect(not removed or self.keys[index] in self.stored, "remove found a record that is not there")
            self.stored.discard(self.keys[index])

        @rule(chosen=several)
        def contains_prefix(self, chosen: list[int]) -> None:
            keys = [self.keys[index] for index in chosen]
            possible = next((i for i, key in enumerate(keys) if key not in self.stored), len(keys))
            count = self.backend.contains_prefix(keys, timeout_s=10.0)
            expect(0 <= count <= possible, f"contains_prefix says {count}, where only {possible} can be there")

        @rule(index=indices)
        def contains(self, index: int) -> None:
            found = self.backend.contains(self.keys[index])
            expect(not found or self.keys[index] in self.stored, "contains finds a record that is not there")

        @precondition(lambda self: self.traits.persistent or self.traits.shared)
        @rule(close=strategies.booleans())
        def open_again(self, close: bool) -> None:
            if not self.traits.persistent or (self.traits.shared and not close):
                self.bench.open()
            else:
                self.bench.reopen()

        def _expect_truth(self, index: int, into: memoryview, result: GetResult, what: str) -> None:
            seen = verdict(self.keys[index], self.sizes[index], into, result)
            allowed = ("present", "missing") if self.keys[index] in self.stored else ("missing",)
            expect(seen in allowed, f"{what}: the record is {seen}, it must be {' or '.join(allowed)}")

        def teardown(self) -> None:
            self.bench.clean_up()

    return BackendMachine
