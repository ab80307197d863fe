"""Measure the peer, LMCache 0.5.6, on command: a JSON request per line on stdin, a JSON answer per line on stdout.

Runs on the peer's own Python, alone.  A request names a case (one of CASES) and a verb: `setup` with its arguments,
`round` for one measured round, `end`.  Every case drives the peer's own public classes the way its own callers do, with
the same bytes as our side, and checks them after loading, outside the measured time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

GiB = 1 << 30
WAIT_MS = 60_000


def load(module: str, *names: str) -> list[Any]:
    """Names of one of the peer's modules."""
    found = importlib.import_module(module)
    return [getattr(found, name) for name in names]


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Keys:
    """Chained chunk hashes of one prompt, by the multiprocess server's TokenHasher with blake3."""

    def __init__(self, tokens: int, chunk_tokens: int, seed: int) -> None:
        np: Any = importlib.import_module("numpy")

        (hasher,) = load("lmcache.v1.multiprocess.token_hasher", "TokenHasher")
        self.hasher = hasher(chunk_tokens, "blake3")
        self.tokens = np.random.default_rng(seed).integers(0, 150_000, tokens).tolist()
        self.chunks = tokens // chunk_tokens

    def round(self) -> dict[str, float]:
        start = time.perf_counter()
        hashes = self.hasher.compute_chunk_hashes(self.tokens)
        taken = time.perf_counter() - start
        assert len(hashes) == self.chunks
        return {"hash": taken}

    def end(self) -> None:
        pass


class Memory:
    """Store and load through LocalCPUBackend: allocate, copy, put; get, copy.

    From and to contiguous tensors, and, as "paged", from and to blocks of 64 KiB in random order by torch's own
    `index_select` and `index_copy_`.
    """

    def __init__(self, chunks: int, capacity_gib: float) -> None:
        torch: Any = importlib.import_module("torch")

        self.torch = torch
        (config_class,) = load("lmcache.v1.config", "LMCacheEngineConfig")
        (metadata_class,) = load("lmcache.v1.metadata", "LMCacheMetadata")
        (backend_class,) = load("lmcache.v1.storage_backend.local_cpu_backend", "LocalCPUBackend")
        (self.key_class,) = load("lmcache.utils", "CacheEngineKey")
        (formats,) = load("lmcache.v1.memory_management", "MemoryFormat")
        self.format = formats.KV_2LTD
        # 2 x 32 layers x 256 tokens x 8 heads x 128 x 2 bytes = 32 MiB
        config = config_class.from_defaults(chunk_size=256, max_local_cpu_size=capacity_gib)
        metadata = metadata_class(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.float16,
            kv_shape=(32, 2, 256, 8, 128),
        )
        self.backend = backend_class(config, metadata, "cpu")
        self.shape = torch.Size([2, 32, 256, 1024])
        raw = torch.randint(0, 255, (chunks, 32 << 20), dtype=torch.uint8)
        self.source = [part.view(torch.float16).view(self.shape) for part in raw]
        self.target = [torch.zeros_like(part) for part in self.source]
        # The same memory as an engine's pages: 32 layers, each with the blocks of all chunks.
        self.source_pages = raw.view(torch.int16).view(32, chunks * 16, 32 << 10)
        self.target_pages = torch.zeros_like(self.source_pages)
        self.ids = list(torch.randperm(chunks * 16, generator=torch.Generator().manual_seed(0)).view(chunks, 16))
        self.number = 0

    def round(self) -> dict[str, float]:
        for target in (*self.target, self.target_pages):
            target.zero_()
        figures = self._through(
            lambda index, entry: entry.copy_(self.source[index]), lambda index, entry: self.target[index].copy_(entry)
        )
        paged = self._through(self._gather, self._scatter)
        for source, target in zip(self.source, self.target, strict=True):
            assert self.torch.equal(source.view(self.torch.int16), target.view(self.torch.int16)), "wrong bytes"
        assert self.torch.equal(self.source_pages, self.target_pages), "wrong bytes in pages"
        return figures | {f"paged {name}": figure for name, figure in paged.items()}

    def _through(self, fill: Callable[[int, Any], Any], take: Callable[[int, Any], Any]) -> dict[str, float]:
        self.number += 1
        keys = [self.key_class("m", 1, 0, (self.number << 32) | i, self.torch.float16) for i in range(len(self.source))]

        def store() -> None:
            for index, key in enumerate(keys):
                entry = self.backend.allocate(self.shape, self.torch.float16, self.format)
                fill(index, entry.tensor)
                self.backend.batched_submit_put_task([key], [entry])
                entry.ref_count_down()

        def retrieve() -> None:
            for index, key in enumerate(keys):
                entry = self.backend.get_blocking(key)
                take(index, entry.tensor)
                entry.ref_count_down()

        figures = {"store": seconds(store), "load": seconds(retrieve)}
        for key in keys:
            self.backend.remove(key)
        return figures

    def _gather(self, index: int, entry: Any) -> None:
        for layer, into in enumerate(self._layers(entry)):
            self.torch.index_select(self.source_pages[layer], 0, self.ids[index], out=into)

    def _scatter(self, index: int, entry: Any) -> None:
        for layer, source in enumerate(self._layers(entry)):
            self.target_pages[layer].index_copy_(0, self.ids[index], source)

    def _layers(self, entry: Any) -> Any:
        return entry.view(self.torch.int16).view(32, 16, 32 << 10)

    def end(self) -> None:
        self.backend.close()
        self.source, self.target = [], []
        del self.source_pages, self.target_pages


class Adapter:
    """A C++ adapter of its second level: one batch of records stored, looked up and loaded again."""

    def __init__(self, spec: dict[str, Any], chunk_nbytes: int, chunks: int) -> None:
        torch: Any = importlib.import_module("torch")

        self.torch = torch
        self.chunks = chunks
        (create,) = load("lmcache.v1.distributed.l2_adapters", "create_l2_adapter")
        (config_of,) = load("lmcache.v1.distributed.l2_adapters.config", "get_l2_adapter_config_class")
        (memory_class,) = load("lmcache.v1.distributed.internal_api", "L1MemoryDesc")
        (self.key_class,) = load("lmcache.v1.distributed.api", "ObjectKey")
        (self.consume,) = load("lmcache.v1.platform", "consume_fd")
        half = chunks * chunk_nbytes
        memory = torch.empty(2 * half + 4096, dtype=torch.uint8)
        start = -memory.data_ptr() % 4096
        self.source = memory[start : start + half]
        self.target = memory[start + half : start + 2 * half]
        self.source.random_(0, 255)
        self.adapter = create(
            config_of(spec["type"]).from_dict(spec),
            l1_memory_desc=memory_class(ptr=self.source.data_ptr(), size=2 * half, align_bytes=4096),
        )
        self.adapter.set_backend_identity(spec["type"])
        self.sources = [self._entry(self.source, i, chunk_nbytes) for i in range(chunks)]
        self.targets = [self._entry(self.target, i, chunk_nbytes) for i in range(chunks)]
        self.number = 0

    def _entry(self, memory: Any, index: int, nbytes: int) -> Any:
        entry, metadata, formats = load(
            "lmcache.v1.memory_management", "TensorMemoryObj", "MemoryObjMetadata", "MemoryFormat"
        )
        raw = memory[index * nbytes : (index + 1) * nbytes]
        described = metadata(
            shape=self.torch.Size([nbytes]),
            dtype=self.torch.uint8,
            address=raw.data_ptr(),
            phy_size=nbytes,
            fmt=formats.KV_2LTD,
            ref_count=1,
        )
        return entry(raw, described, parent_allocator=None)

    def _wait(self, descriptor: int, answer: Callable[[], Any]) -> Any:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while True:
            assert poll.poll(WAIT_MS), "no completion"
            try:
                self.consume(descriptor)
            except BlockingIOError:
                pass
            found = answer()
            if found is not None and found != {}:
                return found

    def round(self) -> dict[str, float]:
        self.number += 1
        adapter = self.adapter
        keys = [
            self.key_class(self.number.to_bytes(8, "big") + i.to_bytes(24, "big"), "bench/model", 0)
            for i in range(self.chunks)
        ]
        self.target.zero_()

        start = time.perf_counter()
        task = adapter.submit_store_task(keys, self.sources)
        stored = self._wait(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
        write = time.perf_counter() - start
        assert stored[task].is_successful(), stored

        start = time.perf_counter()
        task = adapter.submit_lookup_and_lock_task(keys, {})
        found = self._wait(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
        lookup = time.perf_counter() - start
        assert found.popcount() == self.chunks

        start = time.perf_counter()
        task = adapter.submit_load_task(keys, self.targets)
        loaded = self._wait(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        read = time.perf_counter() - start
        assert loaded.popcount() == self.chunks
        assert self.torch.equal(self.source, self.target), "wrong bytes"
        adapter.submit_unlock(keys)
        adapter.delete(keys)
        return {"write": write, "read": read, "lookup": lookup}

    def end(self) -> None:
        self.adapter.close()


class Disk(Adapter):
    """The file system adapter `fs_native`."""

    def __init__(self, directory: str, chunk_nbytes: int, chunks: int, workers: int, odirect: bool) -> None:
        spec = {"type": "fs_native", "base_path": directory, "num_workers": workers, "use_odirect": odirect}
        super().__init__(spec, chunk_nbytes, chunks)


class Resp(Adapter):
    """The adapter `resp` for Redis and Valkey."""

    def __init__(self, port: int, chunk_nbytes: int, chunks: int, workers: int) -> None:
        spec = {"type": "resp", "host": "127.0.0.1", "port": port, "num_workers": workers}
        super().__init__(spec, chunk_nbytes, chunks)


class Server:
    """Its multiprocess server, `lmcache server`, and one client: the client of `lmcache bench server --mode cpu`.

    Without `store` each round only looks the same prompt up, `lookups` times.
    """

    def __init__(self, transfer: str, shape: str, tokens: int, l1_gib: float, lookups: int, store: bool) -> None:
        torch: Any = importlib.import_module("torch")

        self.torch = torch
        (config_class,) = load("lmcache.cli.commands.bench.server_bench.config", "BenchConfig")
        (client_class,) = load("lmcache.cli.commands.bench.server_bench.client", "ServerBenchClient")
        port, http_port = free_port(), free_port()
        command = [os.path.join(os.path.dirname(sys.executable), "lmcache"), "server", "--port", str(port)]
        command += ["--http-port", str(http_port), "--l1-size-gb", str(l1_gib), "--no-l1-use-lazy"]
        command += ["--shm-name", f"lmcache-bench-{os.getpid()}-{port}", "--supported-transfer-mode", "auto"]
        command += ["--eviction-policy", "LRU", "--disable-observability"]
        # Its output goes to a file that nobody reads: a pipe could fill.
        self.server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self._wait_for(port)
            config = config_class(
                rpc_url=f"tcp://localhost:{port}",
                http_url=f"http://localhost:{http_port}",
                mode="cpu",
                transfer_mode=transfer,
                tp_size=1,
                use_mla=False,
                num_tokens=tokens,
                kvcache_shape_spec=shape,
                num_blocks=1024,
                block_size=16,
            )
            self.client = client_class(config, lambda line: None)
            self.client.start()
        except BaseException:
            self.server.kill()
            self.server.wait()
            raise
        self.lookups = lookups
        self.store = store
        self.number = 0
        self.asked = 0
        if not store:
            self.number = 1
            self._store(self._request(1))

    def _wait_for(self, port: int) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.server.poll() is not None:
                raise RuntimeError(f"its server ended with {self.server.returncode}")
            with socket.socket() as probe:
                if probe.connect_ex(("localhost", port)) == 0:
                    return
            time.sleep(0.1)
        raise RuntimeError("its server does not listen")

    def _request(self, number: int) -> Any:
        self.asked += 1
        return self.client.create_request(number, f"request-{self.asked}", "bench")

    def _store(self, request: Any) -> float:
        missed = self.client.lookup(request)
        assert missed.is_full_miss, missed
        stored = self.client.store(request, 0, request.num_full_tokens)
        assert stored.succeeded, stored
        self.client.end_session(request)
        deadline = time.monotonic() + 20
        while True:  # what it stored can be found a little later
            asked = self._request(request.sequence_id)
            found = self.client.lookup(asked)
            self.client.end_session(asked)
            if found.is_full_hit:
                return float(stored.latency_ms) / 1e3
            assert time.monotonic() < deadline, f"stored, and not found: {found}"
            time.sleep(0.05)

    def _blocks(self, request: Any) -> list[Any]:
        (worker,) = self.client._workers
        return [t.narrow(1, request.block_offset, request.num_blocks) for t in worker.kv_caches.values()]

    def round(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        if self.store:
            self.number += 1
            figures["store"] = self._store(self._request(self.number))
        taken = []
        for left in reversed(range(self.lookups)):
            request = self._request(self.number)
            found = self.client.lookup(request)
            assert found.is_full_hit, found
            taken.append(found.latency_ms / 1e3)
            if left:
                self.client.end_session(request)
        taken.sort()
        figures |= {"lookup": taken[len(taken) // 2], "lookup p99": taken[len(taken) * 99 // 100]}
        if self.store:
            blocks = self._blocks(request)
            before = [block.clone() for block in blocks]
            for block in blocks:
                block.zero_()
            loaded = self.client.retrieve(request, 0, request.num_full_tokens)
            assert loaded.succeeded, loaded
            figures["load"] = loaded.latency_ms / 1e3
            for block, wanted in zip(blocks, before, strict=True):
                assert self.torch.equal(block.view(self.torch.uint8), wanted.view(self.torch.uint8)), "wrong bytes"
        self.client.end_session(request)
        return figures

    def end(self) -> None:
        self.client.close()
        self.server.terminate()
        try:
            self.server.wait(10)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        for left in (f"lmcache_kv_{os.getpid()}_*", f"*lmcache-bench-{os.getpid()}-*"):
            for path in Path("/dev/shm").glob(left):
                path.unlink()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return int(sock.getsockname()[1])


def storage_manager(capacity_gib: float, *arguments: str) -> Any:
    """The multiprocess server's StorageManager with one memory level."""
    add_arguments, parse = load("lmcache.v1.distributed.config", "add_storage_manager_args", "parse_args_to_config")
    (manager,) = load("lmcache.v1.distributed.storage_manager", "StorageManager")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    chosen = parser.parse_args(["--l1-size-gb", str(capacity_gib), "--no-l1-use-lazy", *arguments])
    if not hasattr(chosen, "shm_name"):
        chosen.shm_name = ""
    return manager(parse(chosen))


class Lookup:
    """A prefix that is in memory, looked up and given back through StorageManager."""

    def __init__(self, chunks: int) -> None:
        torch: Any = importlib.import_module("torch")

        key_class, layout = load("lmcache.v1.distributed.api", "ObjectKey", "MemoryLayoutDesc")
        task, grouped = load("lmcache.v1.distributed.api", "PrefetchTaskSpec", "GroupedObjectKeys")
        self.manager = storage_manager(0.25, "--eviction-policy", "noop")
        self.keys = [key_class(i.to_bytes(32, "big"), "bench/model", 0) for i in range(chunks)]
        described = layout(shapes=[torch.Size([64])], dtypes=[torch.float16])
        reserved = self.manager.reserve_write(self.keys, described)
        self.manager.finish_write(list(reserved))
        groups: list[Any] = [grouped(keys=self.keys, object_group_id=0, layout_desc=described)]
        self.task: Callable[[], Any] = lambda: task(key_groups=groups, num_kv_readers=1)

    def round(self) -> dict[str, float]:
        start = time.perf_counter()
        handle = self.manager.submit_prefetch_task(self.task())
        assert self.manager.wait_prefetch_status(handle, 10)
        result = self.manager.query_prefetch_status(handle)
        self.manager.finish_read_prefetched(self.keys)
        taken = time.perf_counter() - start
        assert result.l1_hit_count == len(self.keys), result
        return {"lookup": taken}

    def end(self) -> None:
        self.manager.close()


class Pressure:
    """Ten times the capacity offered at full speed: how much of it was stored, in percent."""

    def __init__(self, capacity_nbytes: int, chunk_nbytes: int) -> None:
        torch: Any = importlib.import_module("torch")

        self.key_class, layout = load("lmcache.v1.distributed.api", "ObjectKey", "MemoryLayoutDesc")
        self.manager = storage_manager(capacity_nbytes / GiB, "--eviction-policy", "LRU")
        self.layout = layout(shapes=[torch.Size([chunk_nbytes])], dtypes=[torch.uint8])
        self.source = torch.randint(0, 255, (chunk_nbytes,), dtype=torch.uint8)
        self.offers = 10 * capacity_nbytes // chunk_nbytes
        self.number = 0

    def round(self) -> dict[str, float]:
        stored = 0
        self.number += 1
        start = time.perf_counter()
        for i in range(self.offers):
            key = self.key_class(self.number.to_bytes(8, "big") + i.to_bytes(24, "big"), "bench/model", 0)
            reserved = self.manager.reserve_write([key], self.layout)
            if key in reserved:
                reserved[key].tensor.copy_(self.source)
                self.manager.finish_write([key])
                stored += 1
        taken = time.perf_counter() - start
        return {"stored": 100 * stored / self.offers, "seconds": taken}

    def end(self) -> None:
        self.manager.close()


CASES: dict[str, Any] = {
    "keys": Keys,
    "memory": Memory,
    "disk": Disk,
    "resp": Resp,
    "lookup": Lookup,
    "pressure": Pressure,
    "server": Server,
}


def answer(request: dict[str, Any], running: dict[str, Any]) -> dict[str, Any]:
    """Do one request; `running` holds the cases that are set up."""
    case, verb = request["case"], request["verb"]
    if verb == "setup":
        running[case] = CASES[case](**request["arguments"])
        return {}
    if verb == "round":
        figures: dict[str, Any] = running[case].round()
        return figures
    running.pop(case).end()
    return {}


def main() -> None:
    # The peer prints where it likes: answers leave through a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    running: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line), running)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(reply), file=answers, flush=True)
    for case in running.values():  # whoever measured may have stopped in the middle
        try:
            case.end()
        except Exception:
            traceback.print_exc()
    # Some of the peer's threads never end: leave without waiting for them.
    os._exit(0)


if __name__ == "__main__":
    main()
