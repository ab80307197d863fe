"""vLLM on SmolLM2-135M: time to the first token of a hit, from the daemon's memory, from disk after a restart.

Ours is the connector with a daemon, an engine of several processes, and vLLM's own prefix cache switched off.  The
limit of the rows from memory is vLLM's own prefix cache, which has the KV where it is needed already; that of the rows
from disk, fio reading as many bytes.  The peer is its multiprocess connector with its server, in the same rounds.
Chunks and blocks have 64 tokens on every side.  Engines whose turn it is not are stopped: waiting engines take CPU.
"""

from __future__ import annotations

import random
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from harness import vllm as vllms
from harness.daemon import Served, serve
from harness.fio import JOBS, find_fio, fio_round
from harness.measure import GiB, MiB, Options, Paired, Samples, Timings, interleave, load_average, paired
from harness.peer import Missing
from harness.report import Must, Row, row_of

from lmcache_core.frame import record_nbytes

PROMPTS: Final = {512: (500, 512), 2048: (2000, 2048), 4096: (4000, 4096)}
"""The lengths that are asked for of each prompt that was computed: the shorter one is its beginning."""
QUICK_PROMPTS: Final = {512: (500, 512)}
HITS: Final = 3
STORED_TIMEOUT_S: Final = 60.0
KV_NBYTES: Final = 768 * MiB
DISK_HOST_NBYTES: Final = 256 * MiB
QUICK_DISK_HOST_NBYTES: Final = 64 * MiB
"""The daemon's memory where prompts are asked for from disk: several times what the longest of them has."""
READS: Final = 4
"""Passes over a set in a round: two first tokens, of which the difference is wanted, scatter by as much as it is."""
SHORT: Final = 40
"""Tokens of a prompt that is in no cache: less than a chunk."""
MISS_SHARE: Final = 0.1
LEAST_S: Final = 1e-4
"""What a read takes at least, should the hit from memory that it is set against have been a slow one."""
Engine = Any


class NotHit(Exception):
    """What was stored does not become a hit: there is nothing to measure."""


def rows(options: Options) -> Iterator[Row]:
    vllm = vllms.find_vllm()
    if isinstance(vllm, Missing):
        print(f"vllm: not measured: {vllm.reason}", file=sys.stderr)
        return
    model = vllms.model(vllm, "smollm2")
    prompts = QUICK_PROMPTS if options.quick else PROMPTS
    yield from _memory_rows(options, vllm, model, prompts)
    yield from _disk_rows(options, vllm, model, prompts)
    yield _one_process_row(options, vllm, model, max(prompts))


def _memory_rows(
    options: Options, vllm: vllms.Vllm, model: Path, prompts: Mapping[int, tuple[int, ...]]
) -> Iterator[Row]:
    with ExitStack() as stack:
        served = stack.enter_context(serve(options.directory / "d", 2 * GiB, chunk_tokens=vllms.BLOCK_TOKENS))
        sides: dict[str, Callable[[], Timings] | Missing] = {}
        seen: dict[str, Seen] = {}

        def add(side: str, **arguments: Any) -> None:
            engine = stack.enter_context(_engine(options, vllm, model, side, **arguments))
            seen[side] = Seen()
            sides[side] = lambda: _hits(engine, prompts, seen[side])

        add("ours", kv_transfer_config=vllms.ours(served.socket, options.directory))
        add("limit", enable_prefix_caching=True)
        if isinstance(vllm.peer_python, Missing):
            sides["peer"] = vllm.peer_python
        else:
            port, _ = stack.enter_context(vllms.peer_server(vllm, options.directory, 2.0))
            add("peer", peer=True, kv_transfer_config=vllms.peers(port))
        measured = paired(options, sides)
    equal = _equal_tokens(seen)
    for computed, lengths in prompts.items():
        for length in lengths:
            # Where vLLM computes as many tokens as we do, what it has in place already nothing can be ahead of.
            whole = length % vllms.BLOCK_TOKENS == 0
            must = Must(ratio_limit=1.0, ratio_peer=1.0) if whole else Must(ratio_peer=1.0)
            cached = ", ".join(f"{side} {seen[side].cached[length]}" for side in seen)
            note = f"limit: vLLM's own prefix cache; tokens not computed: {cached}; {equal}"
            row = f"hit, {length:,} tokens"
            yield measured.row("vllm", row, "ms", f"hit {length}", _ms, must=must, note=note)
            if measured.values("ours", f"load {length}", _ms):
                note = "from the step that starts it to the step that hears of its end; the rest is vLLM's"
                row = f"hit, {length:,} tokens, of it the load"
                yield measured.row("vllm", row, "ms", f"load {length}", _ms, peer="none", note=note)
        note = "limit: vLLM alone; what a hit saves, and that a miss costs no more with us"
        yield measured.row("vllm", f"miss, {computed:,} tokens", "ms", f"miss {computed}", _ms, note=note)


class Seen:
    """What a side answered beside its times."""

    def __init__(self) -> None:
        self.cached: dict[int, int] = {}
        self.tokens: list[int] = []
        self.round = 0


def _hits(engine: Engine, prompts: Mapping[int, tuple[int, ...]], seen: Seen) -> Timings:
    """One round of one side: new prompts computed, then asked again whole and in part until they are hits."""
    figures = {}
    engine.resume()
    try:
        seen.round += 1
        for computed, lengths in prompts.items():
            tokens = _prompt(computed, seen.round)
            figures[f"miss {computed}"] = engine.one(tokens)["ttft_s"]
            for length in lengths:
                answers = _hit(engine, tokens[:length], HITS + 1)[1:]
                seen.cached[length] = answers[0]["cached_tokens"]
                seen.tokens.append(answers[0]["tokens"][0])
                figures[f"hit {length}"] = statistics.median(answer["ttft_s"] for answer in answers)
                if loads := _loads_s(engine.log)[-HITS:]:
                    figures[f"load {length}"] = statistics.median(loads)
    finally:
        engine.pause()
    return figures


def _hit(engine: Engine, tokens: list[int], count: int) -> list[dict[str, Any]]:
    """The answers to `count` requests that are hits; those before the KV is stored do not count."""
    answers: list[dict[str, Any]] = []
    deadline = time.monotonic() + STORED_TIMEOUT_S
    while len(answers) < count:
        answer = engine.one(tokens)
        if answer["cached_tokens"] >= _whole(len(tokens) - 1):
            answers.append(answer)
        elif time.monotonic() > deadline:
            raise NotHit(f"{len(tokens)} tokens, {answer['cached_tokens']} of them cached")
    return answers


def _loads_s(log: Path) -> list[float]:
    """How long each load took, from the step that started it to the step that heard of its end."""
    return [float(found) / 1e3 for found in re.findall(r"tokens loaded in ([0-9.]+) ms", log.read_text())]


def _residents(log: Path) -> list[int]:
    """How many tokens of each load were in the daemon's memory."""
    return [int(found) for found in re.findall(r"ms, (\d+) of them in host memory", log.read_text())]


def _equal_tokens(seen: Mapping[str, Seen]) -> str:
    """How often a hit's first token was that of vLLM's own hit: equal KV, but not always equal shapes of batches."""
    pairs = list(zip(seen["ours"].tokens, seen["limit"].tokens, strict=False))
    return f"first token as with vLLM's own hit: {sum(a == b for a, b in pairs)} of {len(pairs)}"


def _disk_rows(
    options: Options, vllm: vllms.Vllm, model: Path, prompts: Mapping[int, tuple[int, ...]]
) -> Iterator[Row]:
    """Computed by one engine with one daemon, asked for with others: hits that read the disk, then hits that do not."""
    folder, store = options.directory / "disk", options.directory / "store"
    lengths = [length for both in prompts.values() for length in both]
    host = QUICK_DISK_HOST_NBYTES if options.quick else DISK_HOST_NBYTES
    # Asked for one set of prompts after another, each set finds all of it pushed out of memory by the others.
    sets = 1 + -(-host // (vllms.SMOLLM2_TOKEN_NBYTES * sum(map(_whole, lengths))))
    wanted = [(length, number) for number in range(sets) for length in lengths]

    @contextmanager
    def running(name: str) -> Iterator[tuple[Engine, Served]]:
        chunks = vllms.BLOCK_TOKENS
        with serve(folder, host, disk=(store, 16 * GiB), chunk_tokens=chunks, policy="lru") as served:
            transfer = vllms.ours(served.socket, options.directory)
            with _engine(options, vllm, model, name, kv_transfer_config=transfer) as engine:
                engine.resume()
                yield engine, served

    with running("writer") as (engine, served):
        for length, number in wanted:
            engine.one(_prompt(length, 1000 + number))
        _drain(served)
    passes = iter(range(1 << 30))
    with running("reader") as (engine, _):
        for length, number in wanted:
            engine.one(_prompt(length, 1000 + number))  # the last set is in memory, the others are not

        load, no_fio = load_average(), find_fio()

        def both() -> Timings:
            """Each read with its limit beside it: what a disk gives changes within seconds."""
            found: Samples = defaultdict(list)
            for number in (next(passes) % sets for _ in range(READS)):
                for length in lengths:
                    figures = _from_disk(engine, length, 1000 + number)
                    if no_fio is None:
                        figures["fio"] = _fio_s(store, length)
                    for what, value in figures.items():
                        found[f"{what} {length}"].append(value)
            return {what: statistics.median(values) for what, values in found.items()}

        samples = interleave({"both": both}, options.rounds)["both"]
    missing = f"no limit: {no_fio.reason}" if no_fio else ""
    measured = Paired({"ours": samples, "limit": samples}, load, missing)
    for length in lengths:
        row = f"from disk, {length:,} tokens"
        note = "first token, engine and daemon restarted"
        yield measured.row("vllm", row, "ms", f"disk {length}", _ms, limit="none", note=note)
        row = f"from disk, {length:,} tokens, beyond a hit from memory"
        note = f"medians of {READS} reads a round; limit: fio reading as many bytes"
        yield measured.row("vllm", row, "ms", f"extra {length}", _ms, limit=f"fio {length}", note=note)
        row = f"from disk, {length:,} tokens, of that the load"
        note = f"from the step that starts it to the step that hears of its end, {note}"
        must = Must(ratio_limit=0.8)
        yield measured.row("vllm", row, "ms", f"load {length}", _ms, limit=f"fio {length}", must=must, note=note)


def _from_disk(engine: Engine, length: int, number: int) -> dict[str, float]:
    """A prompt asked for once from disk, then from memory: the first token, and by how much it and its load differ."""
    tokens = _prompt(length, number)
    for _ in range(HITS):
        engine.one(_prompt(SHORT, 0))  # as before the hits from memory, the engine has just been at work
    first = engine.one(tokens)
    if first["cached_tokens"] < _whole(length - 1) or _residents(engine.log)[-1]:
        raise NotHit(f"{length} tokens: {first['cached_tokens']} cached, some of them not from disk")
    load_s = _loads_s(engine.log)[-1]
    hits = [answer["ttft_s"] for answer in _hit(engine, tokens, HITS)]
    return {
        "disk": first["ttft_s"],
        "extra": max(first["ttft_s"] - statistics.median(hits), LEAST_S),
        "load": max(load_s - statistics.median(_loads_s(engine.log)[-HITS:]), LEAST_S),
    }


def _fio_s(store: Path, length: int) -> float:
    """How long fio reads the chunks of such a prompt; it has files for each of its jobs."""
    chunks = _whole(length) // vllms.BLOCK_TOKENS
    files = -(-chunks // JOBS) * JOBS
    size = record_nbytes(vllms.BLOCK_TOKENS * vllms.SMOLLM2_TOKEN_NBYTES)
    return fio_round(store, file_nbytes=size, files=files, huge=False)["read"] * chunks / files


def _one_process_row(options: Options, vllm: vllms.Vllm, model: Path, length: int) -> Row:
    """While only loads are pending vLLM spins through empty steps, which can starve what copies in the same process."""
    with serve(options.directory / "one", GiB, chunk_tokens=vllms.BLOCK_TOKENS) as served:
        transfer = vllms.ours(served.socket, options.directory)
        one = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with _engine(options, vllm, model, "one", kv_transfer_config=transfer, variables=one) as engine:
            engine.resume()
            rounds = iter(range(1, options.rounds + 2))

            def both() -> Timings:
                tokens = _prompt(length, next(rounds))
                miss = engine.one(tokens)["ttft_s"]
                return {"hit": max(answer["ttft_s"] for answer in _hit(engine, tokens, HITS)), "miss": miss}

            load = load_average()
            found = interleave({"ours": both}, options.rounds)["ours"]
    return row_of(
        "vllm",
        f"slowest hit in one process, {length:,} tokens",
        "ms",
        [_ms(value) for value in found["hit"]],
        limit=[_ms(MISS_SHARE * value) for value in found["miss"]],
        must=Must(ratio_limit=1.0),
        load=load,
        note=f"scheduler and copies share one interpreter; limit: {MISS_SHARE:.0%} of a miss",
    )


@contextmanager
def _engine(options: Options, vllm: vllms.Vllm, model: Path, name: str, **arguments: Any) -> Iterator[Engine]:
    """An engine that has been warmed up, and is stopped until it is told to go on."""
    log = options.directory / f"{name}.log"
    memory = {"kv_cache_memory_bytes": KV_NBYTES, "max_num_seqs": 4}
    with vllms.start(options, vllm, model, log, **memory, **arguments) as engine:
        engine.one(_prompt(300, 0))
        engine.one(_prompt(300, 0), max_tokens=2)
        engine.pause()
        yield engine


def _drain(served: Served) -> None:
    command = [sys.executable, "-m", "lmcache_core.cli", "drain", "--socket", str(served.socket)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)


def _prompt(length: int, number: int) -> list[int]:
    words = random.Random(length << 16 | number)
    return [words.randrange(100, 40_000) for _ in range(length)]


def _whole(tokens: int) -> int:
    """The part of so many tokens that lies in whole chunks."""
    return tokens // vllms.BLOCK_TOKENS * vllms.BLOCK_TOKENS


def _ms(seconds: float) -> float:
    return 1e3 * seconds
