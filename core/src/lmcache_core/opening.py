"""From a configuration to a running cache: loads the plugins that it names, and only those."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from . import choice, plugins
from .backend import Backend, Context
from .buffers import Slab
from .client.cache import RemoteCache, connect
from .codec import Codec
from .config import CacheConfig, PluginsConfig, TierConfig, load_config
from .device import Device
from .direct import DirectPool, direct_staging
from .endpoints import socket_path
from .errors import ConfigError, DeviceError, PluginError
from .events import Events
from .gauges import add_plugin_gauge
from .history import History
from .local import LocalCache
from .logs import request_log
from .metrics import Metrics
from .policy import EvictionPolicy
from .pool import Pool
from .sealing import Sealer
from .tier import Tier
from .trace import Trace

log = logging.getLogger(__name__)
_INSTALLED_ONLY: Final = PluginsConfig()


def open_cache(
    config: CacheConfig | str | Path | None = None,
    *,
    socket: str | Path | None = None,
    load_timeout_s: float = 30.0,
) -> LocalCache | RemoteCache:
    """Open the cache that a configuration, or the YAML file that `load_config` finds, describes.

    With a `socket`, here or in the configuration, the cache is in the daemon that serves it, whose memory and tiers it
    uses; none are opened here, and a daemon that is not there yet is no error; `load_timeout_s` bounds each load from
    it.  Raises ConfigError, PluginError or CapacityError, having closed whatever was open by then.
    """
    if not isinstance(config, CacheConfig):
        config = load_config(config)
    device_name, device = open_device(config.device, config.plugins)
    metrics = Metrics()
    cache = _open_cache(config, socket, load_timeout_s, device_name, device, metrics)
    if config.trace.path and (config.trace.tokens or isinstance(cache, LocalCache)):  # else the daemon writes it
        try:
            cache.trace = Trace(config.trace)
        except ConfigError:
            cache.close()
            raise
    add_plugin_gauge(metrics, [*used_plugins(config), (plugins.DEVICES, device_name)], config.plugins.disable)
    try:
        cache.serve_metrics(config.metrics)
    except ConfigError as error:  # several processes of one configuration: one of them has the port
        log.warning("no metrics are served here: %s", str(error))
    return cache


def _open_cache(
    config: CacheConfig,
    socket: str | Path | None,
    load_timeout_s: float,
    device_name: str,
    device: Device,
    metrics: Metrics,
) -> LocalCache | RemoteCache:
    admission, log_request = config.admission == "auto", request_log(config.log_requests)
    if socket is not None or config.socket is not None:
        path = socket_path(str(socket)) if socket is not None else config.daemon_socket
        return connect(
            path,
            device,
            device_name=device_name,
            call_timeout_s=config.socket_timeout_s,
            load_timeout_s=load_timeout_s,
            metrics=metrics,
            events=open_events(config, metrics),
            admission=admission,
            log_request=log_request,
        )
    pool, events = open_pool(config, metrics, device, shared=False)
    log.info("this process alone uses the host memory: every other that opens a cache of its own takes as much again")
    return LocalCache(
        pool,
        device,
        metrics=metrics,
        events=events,
        device_name=device_name,
        admission=admission,
        log_request=log_request,
    )


def open_pool(
    config: CacheConfig, metrics: Metrics, device: Device | None = None, *, shared: bool
) -> tuple[Pool, Events]:
    """The pool that a configuration describes, with its tiers started, and the events that they emit to.

    Other processes can map its memory if it is `shared`.  `device` is that of an engine in this process, whose records
    may go past host memory.
    """
    use = config.plugins
    host = config.host
    capacity = host.capacity_nbytes if host is not None else config.staging_nbytes
    assert capacity is not None
    new_policy = _policy(host.policy if host is not None else "lru", use)
    below = [tier for tier in config.tiers if tier is not host]
    slab = Slab(capacity, shared=shared)
    events = open_events(config, metrics)
    history = History()
    queue_nbytes = max(capacity // 4, 1)
    tiers: list[Tier] = []
    try:
        for tier in below:
            tiers.append(open_tier(tier, use, metrics, events, max_queued_nbytes=queue_nbytes, history=history))
            tiers[-1].start()
    except BaseException:
        for opened in tiers:
            opened.close()
        events.close()
        raise
    pool = _kind_of_pool(config, tiers, device)(
        slab,
        tiers,
        new_policy=new_policy,
        metrics=metrics,
        events=events,
        history=history,
        policy_name=host.policy if host is not None else "lru",
        name=host.name if host is not None else "staging",
        write=config.write,
        admission=config.admission == "auto",
        tenant_quota_nbytes=host.tenant_quota_nbytes if host is not None else None,
        lease_timeout_s=config.lease_timeout_s,
    )
    log.info(
        "cache ready: %d bytes of host memory, below it %s",
        capacity,
        ", ".join(f"{tier.name} ({tier.backend_name})" for tier in tiers) or "nothing",
    )
    return pool, events


def _kind_of_pool(config: CacheConfig, tiers: list[Tier], device: Device | None) -> Callable[..., Pool]:
    """A pool past host memory where a store, the device and the configuration are made for it; what is so is said."""
    if device is None:
        return Pool
    staging = direct_staging(tiers, device, has_host=config.host is not None, capacity_nbytes=config.staging_nbytes)
    if isinstance(staging, str):
        if staging:
            log.info("device I/O is not used: %s", staging)
        return Pool
    log.info("device I/O: records go between the device and %s past host memory, without checksums", tiers[0].name)
    return partial(DirectPool, staging=staging)


def used_plugins(config: CacheConfig) -> list[tuple[str, str]]:
    """(group, name) of each plugin that a pool with this configuration has loaded."""
    below = [tier for tier in config.tiers if tier is not config.host]
    policies = {tier.policy for tier in config.tiers}
    return [
        *((plugins.BACKENDS, name) for name in sorted({tier.backend for tier in below})),
        *((plugins.CODECS, name) for name in sorted({tier.codec for tier in below})),
        *((plugins.POLICIES, name) for name in sorted(policies if config.host else policies | {"lru"})),
        *((plugins.HOOKS, name) for name in config.plugins.hooks),
    ]


def open_tier(
    config: TierConfig,
    use: PluginsConfig,
    metrics: Metrics,
    events: Events,
    *,
    max_queued_nbytes: int,
    history: History | None = None,
) -> Tier:
    """One tier with its backend, codec and policy; not started."""
    codec = _load(plugins.CODECS, config.codec, use)()

    def codec_named(name: str) -> Codec | None:
        try:
            found = _load(plugins.CODECS, name, use)()
        except PluginError as error:
            log.warning("tier %s holds records of codec %r: %s", config.name, name, error)
            return None
        assert isinstance(found, Codec)
        return found

    new_policy = _policy(config.policy, use)
    backend = open_backend(config, use)
    if config.checksum == "none" and backend.traits.may_tear:
        backend.close()
        raise ConfigError(
            f"tier {config.name}: checksum: none, but after a crash {config.backend} may hold records in part, and "
            "only a checksum tells; leave it out"
        )
    return Tier(
        config.name,
        backend,
        backend_name=config.backend,
        sealer=Sealer(codec, config.codec.partition("@")[0], codec_named, checksums=config.checksum != "none"),
        new_policy=new_policy,
        capacity_nbytes=config.capacity_nbytes,
        tenant_quota_nbytes=config.tenant_quota_nbytes,
        timeout_s=config.timeout_s,
        max_queued_nbytes=max_queued_nbytes,
        metrics=metrics,
        events=events,
        history=history,
        policy_name=config.policy,
    )


def open_backend(config: TierConfig, use: PluginsConfig = _INSTALLED_ONLY) -> Backend[Any]:
    """The backend that a tier names, with its options checked."""
    kind: type[Backend[Any]] = _load(plugins.BACKENDS, config.backend, use)
    options: object = config.options.into(kind.Options)
    return kind(options, Context(capacity_nbytes=config.capacity_nbytes, timeout_s=config.timeout_s))


def open_device(name: str, use: PluginsConfig) -> tuple[str, Device]:
    """The device of that name; "auto" is the one accelerator that is there, or the CPU."""
    if name != "auto":
        kind: type[Device] = _load(plugins.DEVICES, name, use)
        probe = kind.probe()
        if not probe.count:
            raise DeviceError(f"device {name!r} is not there: {probe.reason}")
        return name, _started(name, kind)
    found: list[tuple[str, type[Device]]] = []
    absent: list[str] = []
    for offer in plugins.discover(plugins.DEVICES):
        if offer.name == "cpu" or plugins.is_disabled(offer, use.disable):
            continue
        kind = plugins.load_offer(offer)
        probe = kind.probe()
        if probe.count:
            found.append((offer.name, kind))
        else:
            absent.append(f"{offer.name}: {probe.reason}")
    if len(found) > 1:
        names = ", ".join(sorted(name for name, _ in found))
        raise ConfigError(f"device: auto finds more than one device here ({names}); name the one to use")
    if found:
        return found[0][0], _started(*found[0])
    if absent:
        log.info("device: auto means cpu; %s", "; ".join(absent))
    return "cpu", _load(plugins.DEVICES, "cpu", use)()


def _started(name: str, kind: type[Device]) -> Device:
    device = kind()
    choice.apply(name, device)
    return device


def _load(group: str, name: str, use: PluginsConfig) -> type[Any]:
    return plugins.load(group, name, use.disable, use.inline)


def _policy(name: str, use: PluginsConfig) -> Callable[[], EvictionPolicy]:
    kind: Callable[[], EvictionPolicy] = _load(plugins.POLICIES, name, use)
    return kind


def open_events(config: CacheConfig, metrics: Metrics) -> Events:
    """The events of a cache, which call the hooks that the configuration names."""
    if not config.plugins.hooks and config.plugins.inline is None:
        return Events(None)
    manager = plugins.load_hooks(config.plugins.hooks, config.plugins.disable, config.plugins.inline)

    def call(hook: str, arguments: dict[str, Any]) -> None:
        for name in plugins.call_hooks(manager, hook, **arguments):
            metrics.add("hook_failures", plugin=name)

    heard = frozenset(name for name, caller in vars(manager.hook).items() if caller.get_hookimpls())
    return Events(call, lambda: metrics.add("hook_drops"), heard)
