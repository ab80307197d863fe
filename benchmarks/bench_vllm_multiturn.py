"""32 conversations at once over a vLLM whose own cache is too small for them: requests completed, time to first token.

Ours is the connector with a daemon, the limit vLLM alone, and the column of the peer holds vLLM's own offloading to as
much memory (its CPU engine has no copy for that: `peer/vllm_offload.py` brings one).  vLLM's own prefix cache is on
everywhere.  A turn's prompt is all that was said before; a conversation goes on as soon as it is answered.  With
`--out FOLDER` every request goes into a JSON file there, and a plot.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from harness import vllm as vllms
from harness.daemon import serve
from harness.measure import GiB, MiB, Options, load_average
from harness.peer import Missing
from harness.report import Must, Row, row_of

KV_NBYTES: Final = 384 * MiB
QUICK_KV_NBYTES: Final = 64 * MiB
HOST_NBYTES: Final = 2 * GiB
TALK: Final = {"turns": 6, "opening_tokens": 512, "turn_tokens": 96, "answer_tokens": 32}
FULL: Final = {"conversations": 32, "limit_s": 180.0, **TALK}
QUICK: Final = {"conversations": 8, "limit_s": 30.0, **TALK, "opening_tokens": 256, "answer_tokens": 4}
NAMES: Final = {"ours": "with the connector", "limit": "vLLM alone", "peer": "vLLM's offloading"}
Requests = list[dict[str, Any]]


def rows(options: Options) -> Iterator[Row]:
    vllm = vllms.find_vllm()
    if isinstance(vllm, Missing):
        print(f"vllm-multiturn: not measured: {vllm.reason}", file=sys.stderr)
        return
    model = vllms.model(vllm, "smollm2")
    asked = QUICK if options.quick else FULL
    load = load_average()
    windows = {side: _completed(options, vllm, model, side, asked) for side in NAMES}
    found = {side: requests for side, (requests, _) in windows.items()}
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "vllm-multiturn.json").write_text(json.dumps({"asked": asked, "sides": found}))
        _plot(found, options.out / "vllm-multiturn.png")
    spread = "; ".join(f"{NAMES[side]}: {_described(requests)}" for side, requests in found.items())
    note = f"{asked['conversations']} conversations for {asked['limit_s']:.0f} s; peer: vLLM's offloading; {spread}"
    yield _row("requests completed", "requests", found, lambda each: float(len(each)), load, note)
    if all(found.values()):
        note = "the same requests"
        yield _row("mean time to first token", "s", found, lambda each: _mean(each, "ttft_s"), load, note)
        cost = {side: [cpu_s / len(requests)] for side, (requests, cpu_s) in windows.items()}
        sides = {"limit": cost["limit"], "peer": cost["peer"]}
        note = "all processes of a side; says more than the rows above where others use the machine too"
        yield row_of("vllm-multiturn", "CPU for a request", "CPU-s", cost["ours"], **sides, load=load, note=note)


def _completed(
    options: Options, vllm: vllms.Vllm, model: Path, side: str, asked: dict[str, Any]
) -> tuple[Requests, float]:
    """One window of one side, its caches empty at the beginning: what was completed, and the CPU-seconds it took."""
    arguments: dict[str, Any] = {
        "kv_cache_memory_bytes": QUICK_KV_NBYTES if options.quick else KV_NBYTES,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "max_model_len": 2048,
        "enable_prefix_caching": True,
    }
    with ExitStack() as stack:
        if side == "ours":
            folder = options.directory / "d"
            served = stack.enter_context(serve(folder, HOST_NBYTES, chunk_tokens=vllms.BLOCK_TOKENS))
            arguments["kv_transfer_config"] = vllms.ours(served.socket, options.directory)
        elif side == "peer":
            arguments["kv_transfer_config"] = vllms.offloading(HOST_NBYTES)
        engine = stack.enter_context(vllms.start(options, vllm, model, options.directory / f"{side}.log", **arguments))
        engine.one(range(100, 400), max_tokens=2)
        pids = (engine.pid, served.pid) if side == "ours" else (engine.pid,)
        before = vllms.cpu_s(*pids)
        answer = engine.ask("converse", seed=1, timeout_s=4 * asked["limit_s"] + 60, **asked)
        cpu_s = vllms.cpu_s(*pids) - before
    requests: Requests = answer["completed"]
    return requests, cpu_s


def _row(
    name: str, unit: str, found: dict[str, Requests], figure: Callable[[Requests], float], load: float, note: str
) -> Row:
    values = {side: [figure(requests)] for side, requests in found.items()}
    return row_of(
        "vllm-multiturn", name, unit, values["ours"], limit=values["limit"], peer=values["peer"],
        must=Must(ratio_limit=1.0), load=load, note=note,
    )  # fmt: skip


def _described(requests: Requests) -> str:
    share = sum(each["cached_tokens"] for each in requests) / max(1, sum(each["prompt_tokens"] for each in requests))
    return f"{share:.0%} of the prompts' tokens cached, mean prompt {_mean(requests, 'prompt_tokens'):.0f}"


def _mean(requests: Requests, what: str) -> float:
    return statistics.fmean(each[what] for each in requests) if requests else float("nan")


def _plot(found: dict[str, Requests], path: Path) -> None:
    """Left: requests completed over time; right: time to first token by turn."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for side, requests in found.items():
        times = sorted(each["at_s"] for each in requests)
        left.plot(times, range(1, len(times) + 1), label=NAMES[side])
        turns = sorted({each["turn"] for each in requests})
        means = [_mean([each for each in requests if each["turn"] == turn], "ttft_s") for turn in turns]
        right.plot([turn + 1 for turn in turns], means, marker="o", label=NAMES[side])
    left.set(xlabel="seconds", ylabel="requests completed")
    right.set(xlabel="turn", ylabel="mean time to first token, s", ylim=(0, None))
    left.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
