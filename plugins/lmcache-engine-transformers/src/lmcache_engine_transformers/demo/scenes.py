"""The scenes of the demo, one after the other, and what each cost."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import uuid
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from lmcache_core import CacheConfig, ConfigError, load_config

from .. import open_prefix_cache
from ..prefix import Report
from . import texts, weights
from .answers import Agreement, Answer, Tick, earlier_answer, ticks, warm_up, with_cache, without_cache
from .conversation import Parting, next_turn, opening, parting

ANSWER_TOKENS: Final = 16
_CHILD_TIMEOUT_S: Final = 900
_SENT: Final = ("prompt_tokens", "hit_tokens", "resident_tokens", "nbytes", "ttft_s", "uncached")
"""What the second process reports."""


class Progress(Protocol):
    """Shows which scene is playing and how far it is."""

    def scene(self, title: str, total: int | None) -> AbstractContextManager[Tick]: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    title: str
    prompt_tokens: int
    hit_tokens: int
    nbytes: int
    tier: str
    with_s: float
    without_s: float | None
    """From a run without the cache, where there was one for this prompt."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that is shown at the end."""

    rows: tuple[Row, ...]
    agreement: Agreement
    parting: Parting
    first_answer: str

    @property
    def figures(self) -> dict[str, Any]:
        """What `--json` prints."""
        cold, warm = self.rows[0], self.rows[1]
        restart = self.rows[-1]
        return {
            "cold_ttft_s": round(cold.with_s, 4),
            "warm_ttft_s": round(warm.with_s, 4),
            "restart_ttft_s": round(restart.with_s, 4),
            "prompt_tokens": cold.prompt_tokens,
            "hit_tokens": warm.hit_tokens,
            "restart_hit_tokens": restart.hit_tokens,
            "tokens_equal": self.agreement.tokens_equal,
            "max_logit_diff": self.agreement.max_logit_diff,
        }


@dataclass(frozen=True, slots=True)
class Order:
    """What the second process is asked to do."""

    model: str
    config: str
    salt: str
    prompt: list[int]
    answer: str
    """Where to put its answer."""


def play(model: Any, tokenizer: Any, folder: Path, config: Path, progress: Progress) -> Outcome:
    """All scenes.  Four prompts are computed in full: one to fill the cache, three to compare with."""
    settings = replace(load_config(config), admission="always")  # to show what a hit does, dear or not
    # A tenant of its own, so that an earlier demo's records do not warm this one; through a daemon they shall.
    salt = "demo" if settings.socket else f"demo-{uuid.uuid4().hex}"
    if not settings.socket and settings.tiers[-1] is settings.host:
        raise ConfigError(f"{config}: the demo needs a tier below host memory, such as disk, for its new process")
    total = ticks(model, ANSWER_TOKENS)
    system = texts.system_prompt()
    rows: list[Row] = []
    agreement = Agreement()

    def scene(title: str) -> AbstractContextManager[Tick]:
        return progress.scene(title, total)

    def plain(prompt: list[int], of: str) -> Any:
        with scene(f"to compare: {of}, without the cache") as tick:
            return without_cache(model, prompt, ANSWER_TOKENS, tick)

    with open_prefix_cache(model, settings, name=weights.NAME) as prefix:

        def cached(title: str, prompt: list[int], without_s: float | None) -> Answer:
            with scene(title) as tick:
                answer, report = with_cache(prefix, prompt, ANSWER_TOKENS, tick, salt=salt)
            rows.append(_row(title, report, without_s, settings))
            return answer

        warm_up(model)
        first = opening(tokenizer, system, texts.TURNS[0])
        cold_answer = cached("first request" if settings.socket else "first request, cold", first, None)
        cold_s = rows[0].with_s
        if rows[0].hit_tokens:  # another process was here before us
            reference = plain(first, "first request")
            agreement.add(cold_answer, reference.answer)
            cold_s = reference.ttft_s
            rows[0] = replace(rows[0], without_s=cold_s)
        agreement.add(cached("same request again", first, cold_s), cold_answer)

        second = next_turn(tokenizer, first, cold_answer.tokens, texts.TURNS[1])
        second_answer = cached("turn 2", second, None)
        third = next_turn(tokenizer, second, second_answer.tokens, texts.TURNS[2])
        reference = plain(third, "turn 3")
        agreement.add(cached("turn 3", third, reference.ttft_s), reference.answer)
        for prompt, answer in ((first, cold_answer), (second, second_answer)):
            agreement.add(answer, earlier_answer(model, reference, len(prompt), len(answer.tokens)))

        other = opening(tokenizer, system, texts.OTHER_CONVERSATION)
        reference = plain(other, "another conversation")
        agreement.add(cached("another conversation", other, reference.ttft_s), reference.answer)

        changed = texts.with_one_space_more(system)
        spaced = opening(tokenizer, changed, texts.TURNS[0])
        reference = plain(spaced, "one space more")
        agreement.add(cached("one space more", spaced, reference.ttft_s), reference.answer)
        place = parting(first, spaced, system, changed, settings.chunk_tokens)

    order = Order(str(folder), str(config), salt, first, "")
    title = f"new process, from {'the daemon' if settings.socket else 'disk'}"
    with progress.scene(title, None):
        restart_answer, report = _in_a_new_process(order)
    agreement.add(restart_answer, cold_answer)
    rows.append(_row(title, report, cold_s, settings))
    return Outcome(tuple(rows), agreement, place, tokenizer.decode(cold_answer.tokens, skip_special_tokens=True))


def obey(path: Path) -> None:
    """The second process: load the model, open the cache, answer, and print the report."""
    order = Order(**json.loads(path.read_text()))
    model, _ = weights.load(Path(order.model))
    warm_up(model)
    with open_prefix_cache(model, order.config, name=weights.NAME) as prefix:
        answer, report = with_cache(prefix, order.prompt, ANSWER_TOKENS, lambda: None, salt=order.salt)
    answer.save(Path(order.answer))
    print(json.dumps({name: getattr(report, name) for name in _SENT}))


def _in_a_new_process(order: Order) -> tuple[Answer, Report]:
    with tempfile.TemporaryDirectory(prefix="lmcache-demo-") as folder:
        answer, letter = Path(folder) / "answer.npz", Path(folder) / "order.json"
        letter.write_text(json.dumps({**asdict(order), "answer": str(answer)}))
        command = [sys.executable, "-m", __package__, "--obey", str(letter)]
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_CHILD_TIMEOUT_S)
        return Answer.load(answer), Report(**json.loads(child.stdout.splitlines()[-1]))


def _row(title: str, report: Report, without_s: float | None, settings: CacheConfig) -> Row:
    return Row(
        title, report.prompt_tokens, report.hit_tokens, report.nbytes, _tier(report, settings), report.ttft_s, without_s
    )


def _tier(report: Report, settings: CacheConfig) -> str:
    """Where a hit came from, in the configuration's words."""
    if not report.hit_tokens:
        return ""
    if settings.socket:
        return "daemon"
    host = [settings.host.name] if settings.host is not None and report.resident_tokens else []
    below = [tier.name for tier in settings.tiers if tier is not settings.host]
    return " + ".join([*host, *(below if report.resident_tokens < report.hit_tokens else [])])
