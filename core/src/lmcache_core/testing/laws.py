"""What a law is: a sentence that every plugin of a kind keeps, which no test-suite can redefine.

A test-suite subclasses a set of laws and pytest collects them.  Without pytest, `Laws.check()` runs them one by one.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, NoReturn

from ..backend import API_VERSION, ApiVersion

Outcome = Literal["passed", "failed", "skipped", "known"]
_FIRST_API: Final[ApiVersion] = (1, 0)


class LawBroken(AssertionError):
    """A law does not hold; the message says what was seen."""


class LawSkipped(Exception):
    """A law has nothing to say about this plugin."""


@dataclass(frozen=True, slots=True)
class Law:
    """One law: `name` is its sentence with underscores, `body` the proof, `since` the API version that brought it."""

    name: str
    since: ApiVersion
    body: Callable[[Any], None]
    doc: str

    @property
    def sentence(self) -> str:
        return self.name.removeprefix("test_").replace("_", " ")


@dataclass(frozen=True, slots=True)
class LawResult:
    """What came of one law for one plugin."""

    name: str
    outcome: Outcome
    """"known" is a failure that the plugin declares, with its reason."""
    detail: str = ""
    error: BaseException | None = None

    @property
    def ok(self) -> bool:
        return self.outcome != "failed"


def expect(condition: object, message: str) -> None:
    """Raise LawBroken with `message` unless `condition` holds; unlike assert, also under `python -O`."""
    if not condition:
        raise LawBroken(message)


def expect_api_version(kind: type) -> None:
    """Raise LawBroken unless `kind` states an API version of its own that this core speaks."""
    version: Any = getattr(kind, "api_version", None)
    expect(
        isinstance(version, tuple) and len(version) == 2 and all(type(part) is int for part in version),
        f"api_version must be two integers, e.g. (1, 0), got {version!r}",
    )
    expect(version is not API_VERSION, "api_version must be a literal: API_VERSION changes with core")
    expect(
        version[0] == API_VERSION[0] and version[1] <= API_VERSION[1],
        f"api_version {version} cannot be used by a core that speaks {API_VERSION}",
    )


def outcome_of(call: Callable[[], object]) -> object:
    """What a call returned, or the exception that it raised."""
    try:
        return call()
    except Exception as error:
        return error


def skip(reason: str) -> NoReturn:
    raise LawSkipped(reason)


def law(*, since: ApiVersion) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Make a method of a `Laws` class a law.  Plugins written for an API older than `since` are not held to it."""

    def wrap(body: Callable[[Any], None]) -> Callable[[Any], None]:
        the_law = Law(body.__name__, since, body, body.__doc__ or "")

        def run(self: Laws) -> None:
            _report_to_pytest(self.run_law(the_law))

        run.__name__, run.__qualname__, run.__doc__ = body.__name__, body.__qualname__, body.__doc__
        run.__module__ = body.__module__
        run.law = the_law  # type: ignore[attr-defined]
        return run

    return wrap


class Laws:
    """A set of laws.  Subclasses supply the plugin under test; they cannot redefine or disable a law."""

    known_failures: ClassVar[Mapping[str, str]] = {}
    """Name of a law to the reason why this plugin breaks it.  Strict: a law listed here that holds is a failure."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for base in cls.__mro__[1:]:
            for name, value in vars(base).items():
                if _law_of(value) is not None and getattr(cls, name) is not value:
                    raise TypeError(f"{cls.__name__} redefines the law {name}; declare it in known_failures instead")
        unknown = set(cls.known_failures) - {each.name for each in cls.laws()}
        if unknown:
            raise TypeError(f"{cls.__name__}.known_failures names no law: {', '.join(sorted(unknown))}")

    @classmethod
    def laws(cls) -> list[Law]:
        """Every law of the class, base by base in the order of their definition."""
        found: dict[str, Law] = {}
        for base in cls.__mro__:
            for name, value in vars(base).items():
                each = _law_of(value)
                if each is not None:
                    found.setdefault(name, each)
        return list(found.values())

    def api_version(self) -> ApiVersion:
        """The API version that the plugin declares; asked between `setup_law` and the law."""
        raise NotImplementedError

    def setup_law(self) -> None:
        """Called before each law."""

    def teardown_law(self) -> None:
        """Called after each law, also a broken one."""

    def run_law(self, each: Law) -> LawResult:
        """Check one law.  Raises nothing but what is not an Exception, such as KeyboardInterrupt."""
        reason = self.known_failures.get(each.name)
        try:
            self.setup_law()
            try:
                version = self.api_version()
                if version < each.since:
                    since, declared = (".".join(map(str, v)) for v in (each.since, version))
                    raise LawSkipped(f"a law since API {since}, the plugin declares {declared}")
                each.body(self)
            finally:
                self.teardown_law()
        except LawSkipped as skipped:
            return LawResult(each.name, "skipped", str(skipped))
        except Exception as error:
            if reason is not None:
                return LawResult(each.name, "known", reason, error)
            text = str(error) if isinstance(error, LawBroken) else f"{type(error).__name__}: {error}"
            return LawResult(each.name, "failed", text, error)
        if reason is not None:
            broken = LawBroken(f"holds, but is declared in known_failures: {reason}")
            return LawResult(each.name, "failed", str(broken), broken)
        return LawResult(each.name, "passed")

    def check(self, only: Sequence[str] = ()) -> Iterator[LawResult]:
        """Check the laws (of these names), without pytest, yielding each result as it comes."""
        for each in self.laws():
            if not only or each.name in only:
                yield self.run_law(each)

    def results(
        self, only: Sequence[str] = (), on_result: Callable[[LawResult], None] | None = None
    ) -> list[LawResult]:
        """All of `check`; `on_result` hears of each law as it has been checked."""
        found: list[LawResult] = []
        for result in self.check(only):
            found.append(result)
            if on_result is not None:
                on_result(result)
        return found


def in_threads(*functions: Callable[[], None], timeout_s: float = 60.0) -> None:
    """Run the functions at the same time; raises what the first of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(function: Callable[[], None]) -> None:
        try:
            start.wait(timeout_s)
            function()
        except BaseException as error:  # raised again below, in the thread that asked
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True, name="law") for f in functions]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    expect(not any(t.is_alive() for t in threads), f"calls from several threads did not end in {timeout_s} s")


_SECRET: Final = re.compile(
    r"(^|_)(password|passwd|passphrase|secret|token|credentials?|(secret|access|api|private)_key)$"
)


def is_secret_name(name: str) -> bool:
    """Whether an option's name says that its value must not be shown."""
    return _SECRET.search(name) is not None


def _law_of(value: object) -> Law | None:
    found = getattr(value, "law", None) if callable(value) else None
    return found if isinstance(found, Law) else None


def _report_to_pytest(result: LawResult) -> None:
    if result.outcome == "passed":
        return
    if result.outcome == "failed":
        raise result.error or LawBroken(result.detail)
    import pytest

    if result.outcome == "known":
        pytest.xfail(result.detail)
    pytest.skip(f"does not apply: {result.detail}")
