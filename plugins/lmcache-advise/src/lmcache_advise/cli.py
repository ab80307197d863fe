"""`lmc advise`: is a KV cache worth it for this model and these requests, and which."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from lmcache_core import CacheError, ConfigError

from . import page, reading, writing
from .advice import Case
from .distances import curve_of
from .kv import Kv, kv_of
from .machine import DISK, HOST, REMOTE, GiB, Machine, Store, machine_of
from .models import DTYPE_NBYTES, ModelConfig, read_model
from .parameters import parameters_of
from .requests import MAX_BLOCKS, Requests
from .study import Study, study_of
from .units import COUNT, COUNT_OR_NONE, RATE, SIZE, TIME
from .workload import Workload, requests_of

_FILE = click.Path(path_type=Path)


@click.command("advise", help="Say whether a KV cache is worth it, which tiers, how large: from a model and a trace.")
@click.argument("model", type=_FILE)
@click.argument("trace", nargs=-1, type=_FILE)
@click.option("--format", "kind", type=click.Choice(("auto", *reading.FORMATS)), default="auto", show_default=True)
@click.option("--block-tokens", type=click.IntRange(1, 1 << 20), help="Of the trace.  [default: as the format has it]")
@click.option("--users", type=COUNT, help="Instead of a trace: conversations that are open at a time.")
@click.option("--prompt", type=COUNT, default=4000.0, help="Tokens of a conversation's first request.  [default: 4k]")
@click.option("--turns", type=COUNT, default=8.0, help="Requests of a conversation.  [default: 8]")
@click.option("--turn-tokens", type=COUNT, default=500.0, help="What each adds to the prompt.  [default: 500]")
@click.option("--output", type=COUNT, default=300.0, help="Tokens of an answer.  [default: 300]")
@click.option("--shared", type=COUNT, default=0.0, help="Of the prompt, the same for all.  [default: 0]")
@click.option("--rate", type=float, default=1.0, show_default=True, help="Requests per second.")
@click.option("--time", "duration", type=TIME, default=3600.0, help="How long that goes on.  [default: 1h]")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--kv-dtype", type=click.Choice(("auto", *DTYPE_NBYTES)), default="auto", show_default=True)
@click.option("--kv-nbytes", type=SIZE, help="KV of one token, where config.json does not say enough.")
@click.option(
    "--engine-cache", type=COUNT_OR_NONE, help="Tokens in the engine's own cache, as its log says; 0: it has none."
)
@click.option("--gpu-memory", type=SIZE, default=80.0 * GiB, help="Of one GPU.  [default: 80GiB]")
@click.option("--gpus", type=click.IntRange(1, 1024), help="[default: as few as hold the weights]")
@click.option("--prefill", type=COUNT, help="Prompt tokens that the engine computes in a second.")
@click.option("--tflops", type=float, default=400.0, show_default=True, help="What a GPU really does in a prefill.")
@click.option("--host-memory", type=SIZE, default=128.0 * GiB, help="At most.  [default: 128GiB]")
@click.option("--host-bandwidth", type=RATE, default=20e9, help="To the GPU.  [default: 20GB/s]")
@click.option("--disk", type=SIZE, default=float(1 << 40), help="At most.  [default: 1TiB]")
@click.option("--disk-bandwidth", type=RATE, default=3e9, help="Reading.  [default: 3GB/s]")
@click.option("--disk-write", type=RATE, default=1.5e9, help="Writing.  [default: 1.5GB/s]")
@click.option("--disk-latency", type=TIME, default=1e-3, help="[default: 1ms]")
@click.option("--disk-path", default="/var/cache/lmcache", show_default=True, help="For the configuration.")
@click.option("--remote", type=SIZE, help="A remote store, at most.  [default: none]")
@click.option("--remote-bandwidth", type=RATE, default=1e9, help="[default: 1GB/s]")
@click.option("--remote-latency", type=TIME, default=2e-3, help="[default: 2ms]")
@click.option("--remote-backend", default="redis", show_default=True, help="For the configuration.")
@click.option("--remote-url", default="redis://127.0.0.1:6379/0", show_default=True, help="For the configuration.")
@click.option("--chunk-tokens", type=click.IntRange(1, 1 << 20), help="[default: those of a trace of ours, else 256]")
@click.option("--worth", type=click.FloatRange(0.0, 1.0), default=0.05, show_default=True,
              help="What a tier must save to be worth running, of the time to compute all prompts.")  # fmt: skip
@click.option("--window", type=TIME, default=600.0, help="Of the tokens in use.  [default: 10min]")
@click.option("--max-blocks", type=click.IntRange(1000), default=MAX_BLOCKS, show_default=True,
              help="Block references that are kept; of a longer trace an even sample.")  # fmt: skip
@click.option("--no-policies", is_flag=True, help="Do not replay the eviction policies.")
@click.option("--plot", "plot_file", type=_FILE, help="Draw it, as PNG (needs matplotlib).")
@click.option("--html", type=_FILE, help="Write it as a page of its own.")
@click.option("--yaml", "yaml_file", type=_FILE, help="Write the configuration.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def advise(model: Path, trace: tuple[Path, ...], as_json: bool, **options: Any) -> None:
    """MODEL is a config.json or its folder.  TRACE is a file of requests; without one, say what --users do."""
    try:
        study = study_with(read_model(model), trace, options)
        if options["plot_file"]:
            page.plot(study, options["plot_file"])
        for name, text in (("html", page.html_of), ("yaml_file", lambda found: found.yaml)):
            if options[name]:
                write_text(options[name], text(study))
    except CacheError as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(study.as_json(), indent=1) if as_json else page.text_of(study), nl=as_json)


def study_with(model: ModelConfig, trace: tuple[Path, ...], options: dict[str, Any]) -> Study:
    """The study that the command's options ask for."""
    kv = kv_with(model, options["kv_dtype"], options["kv_nbytes"])
    requests, chunk_tokens = _requests_with(trace, options)
    if not len(requests) or not requests.tokens:
        raise ConfigError("there is no request with a prompt in it")
    case = Case(
        curve_of(requests),
        kv,
        _machine_with(model, kv, requests, options),
        requests.seconds,
        chunk_tokens,
        options["worth"],
    )
    study = study_of(requests, case, window_s=options["window"], policies=not options["no_policies"])
    remote = {"backend": options["remote_backend"], "url": options["remote_url"]}
    return replace(study, yaml=writing.yaml_of(study.advice, chunk_tokens, options["disk_path"], remote))


def kv_with(model: ModelConfig, dtype: str, nbytes: float | None) -> Kv:
    """The model's KV, or one of `nbytes` a token."""
    if nbytes is None:
        return kv_of(model, dtype)
    heads = model.integer("num_key_value_heads", "num_attention_heads", default=1)
    mla = model.has("kv_lora_rank")
    return Kv(model.model_type, "any dtype", "as given", nbytes, heads=0 if mla else heads)


def _requests_with(trace: tuple[Path, ...], options: dict[str, Any]) -> tuple[Requests, int]:
    if trace and options["users"] is not None:
        raise click.UsageError("give a trace, or --users; not both")
    if trace:
        paths = reading.with_older(trace[0]) if len(trace) == 1 else list(trace)
        found = reading.read_trace(
            paths, kind=options["kind"], block_tokens=options["block_tokens"], max_blocks=options["max_blocks"]
        )
        for line in found.bad:
            print(f"left out: {line}", file=sys.stderr)
        if found.bad_lines > len(found.bad):
            print(f"left out: {found.bad_lines - len(found.bad)} more lines", file=sys.stderr)
        ours = found.requests.block_tokens if found.kind == reading.LMCACHE else 256
        return found.requests, options["chunk_tokens"] or ours
    if options["users"] is None:
        raise click.UsageError("give a trace, or --users with --prompt, --turns, --rate and so on")
    chunk_tokens = options["chunk_tokens"] or 256
    work = Workload(
        users=int(options["users"]), prompt_tokens=int(options["prompt"]), turns=int(options["turns"]),
        turn_tokens=int(options["turn_tokens"]), output_tokens=int(options["output"]),
        shared_tokens=int(options["shared"]), requests_per_s=options["rate"], seconds=options["duration"],
        seed=options["seed"],
    )  # fmt: skip
    return requests_of(work, chunk_tokens, options["max_blocks"]), chunk_tokens


def _machine_with(model: ModelConfig, kv: Kv, requests: Requests, options: dict[str, Any]) -> Machine:
    stores = [
        Store(HOST, options["host_memory"], options["host_bandwidth"], options["host_bandwidth"], 0.0),
        Store(DISK, options["disk"], options["disk_bandwidth"], options["disk_write"], options["disk_latency"]),
    ]
    if options["remote"] is not None:
        rate = options["remote_bandwidth"]
        stores.append(Store(REMOTE, options["remote"], rate, rate, options["remote_latency"]))
    given = options["engine_cache"] is not None and options["prefill"] is not None
    return machine_of(
        kv, None if given else parameters_of(model), tuple(stores), engine_tokens=options["engine_cache"],
        prefill_tokens_s=options["prefill"], gpu_nbytes=options["gpu_memory"], gpus=options["gpus"],
        tflops=options["tflops"], position=requests.mean_position,
    )  # fmt: skip


def write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CacheError(f"{path}: cannot be written: {error.strerror}") from error
