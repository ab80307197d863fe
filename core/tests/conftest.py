"""Counts the mutants of the conformance kit, for the end of the output."""

from __future__ import annotations

from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A test that shows a mutant to its law says so with `record_property("mutant", "<kind> <law>")`."""
    shown: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    laws: dict[str, set[str]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in getattr(report, "user_properties", ()):
                if name == "mutant" and report.when == "call":
                    kind, _, law = value.partition(" ")
                    shown[kind] += 1
                    caught[kind] += outcome == "passed"
                    laws.setdefault(kind, set()).add(law)
    for kind in sorted(shown):
        terminalreporter.write_line(
            f"{kind} laws: {caught[kind]} of {shown[kind]} mutants caught, of {len(laws[kind])} laws"
        )
