"""How fast do STORE and RETRIEVE move KV, as the worker sees it, beside a memcpy of the same size in the same loop?

A server process and this process as the worker; every round stores fresh chunks, loads them into other blocks and
copies the same bytes with numpy between two touched memfds, so that noise hits all. Medians of ratios.
A run is the bytes of one block in one plane; the smaller it is, the more often the copy starts anew.

Then the ways in which KV may travel, for a cache like that of Llama 8B (32 layers, 8 KV heads of 128, bf16: K and V
are runs of 32 KiB): the server copies (``server_driven``), from shared memory or by way of a mirror, or the worker does
(``engine_driven``), by the mapped pool (``shm``) or over the wire (``inline``), by a unix socket or TCP.

There are two copies to stand beside: one chunk of 32 MiB after the other, as a cache moves them, which the goals are
about; and all at once, where glibc switches to streaming stores above a size of its own and gets faster.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from _common import Row, arguments, report

import lmlive
from lmlive.testing import ServerProcess

BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
CHUNK_BYTES = 32 << 20
GOALS = {16: 0.60, 32: 0.75, 64: 0.90, 256: 0.90, 2048: 0.90}
"""KiB of one run -> share of memcpy."""


WAYS = (
    ("server_driven", "", True),
    ("server_driven, mirror", "", False),
    ("engine_driven, shm", "shm", True),
    ("engine_driven, shm, private memory", "shm", False),
    ("engine_driven, inline", "inline", True),
    ("engine_driven, inline, tcp", "inline", True),
)
"""What it is called, the strategy of an engine that copies, and whether the cache lies in shared memory."""
LLAMA_KIB = 32
FULL_POOL = 4
"""Stores until the pool is full, in these rows."""


def make_cache(run_kib: int, chunks: int, *, shared: bool = True) -> dict[str, npt.NDArray[np.int64]]:
    """Give planes of runs of this size, twice as many blocks as the chunks need, filled with random bytes."""
    planes = CHUNK_BYTES * BLOCK_TOKENS // CHUNK_TOKENS // (run_kib << 10)
    blocks = 2 * chunks * CHUNK_TOKENS // BLOCK_TOKENS
    cache = {}
    for plane in range(planes):
        shape = (blocks, run_kib * 128)
        tensor: npt.NDArray[np.int64] = lmlive.shared_empty(shape, "int64") if shared else np.empty(shape, np.int64)
        tensor[:] = np.random.default_rng(plane).integers(0, 1 << 62, tensor.shape)
        cache[f"plane.{plane}"] = tensor
    return cache


async def measure(
    url: str,
    run_kib: int,
    chunks: int,
    rounds: int,
    *,
    way: str = "",
    strategy: str = "",
    shared: bool = True,
    warm_up: int = 1,
) -> list[Row]:
    """Measure one run size, in one way."""
    cache = make_cache(run_kib, chunks, shared=shared)
    blocks = chunks * CHUNK_TOKENS // BLOCK_TOKENS
    source, target = list(range(blocks)), list(range(blocks, 2 * blocks))
    size = blocks * sum(tensor.nbytes // (2 * blocks) for tensor in cache.values())
    left, right = (lmlive.shared_empty((size // 8,), "int64") for _ in range(2))
    left[:] = 1
    right[:] = 2
    step = CHUNK_BYTES // 8
    stores, loads, copies, wholes = [], [], [], []
    mode = "engine_driven" if strategy else "server_driven"
    config = lmlive.WorkerConfig(request_timeout=60.0, mode=mode, strategy=strategy or "auto")
    async with lmlive.Worker(
        url, kv_caches=cache, block_tokens=BLOCK_TOKENS, model=f"run-{run_kib}", config=config
    ) as worker:
        for round_ in range(rounds + warm_up):
            tokens = list(range(round_, round_ + chunks * CHUNK_TOKENS))
            start = time.perf_counter()
            np.copyto(right, left)
            begin = time.perf_counter()
            for first in range(0, left.size, step):
                np.copyto(right[first : first + step], left[first : first + step])
            copied = time.perf_counter()
            stored = await worker.store(tokens, source)
            middle = time.perf_counter()
            loaded = await worker.retrieve(tokens, target)
            end = time.perf_counter()
            if stored.chunks != chunks or loaded.reason != "loaded":
                raise RuntimeError(f"not measured: {stored} {loaded}")
            if round_ < warm_up:  # warms the mappings on both sides
                continue
            wholes.append(begin - start)
            copies.append(copied - begin)
            stores.append(middle - copied)
            loads.append(end - middle)
        if any(not np.array_equal(tensor[source], tensor[target]) for tensor in cache.values()):
            raise RuntimeError("what was loaded is not what was stored")
    return rows_of(run_kib, size, (copies, wholes), (stores, loads), way)


def rows_of(
    run_kib: int,
    size: int,
    copies: tuple[list[float], list[float]],
    moves: tuple[list[float], list[float]],
    way: str,
) -> list[Row]:
    """Give the ratios with their goals, and the rates behind them."""
    by_chunk, at_once = copies
    rows = []
    for name, seconds in zip(("STORE", "RETRIEVE"), moves, strict=True):
        ratio = statistics.median(copy / took for copy, took in zip(by_chunk, seconds, strict=True))
        whole = statistics.median(copy / took for copy, took in zip(at_once, seconds, strict=True))
        rates = [size / statistics.median(times) / 1e9 for times in (seconds, by_chunk, at_once)]
        note = (
            f"{rates[0]:.1f} GB/s; memcpy {rates[1]:.1f} GB/s by chunk, {rates[2]:.1f} GB/s all at once (then the "
            f"ratio is {whole:.2f}); {size >> 20} MiB"
        )
        goal = None if way else GOALS[run_kib]
        rows.append(Row(f"{name}, {way or f'runs of {run_kib} KiB'}", ratio, "memcpy", goal, at_least=True, note=note))
    return rows


async def main() -> None:
    """Measure and print."""
    parser = arguments("How fast do STORE and RETRIEVE move KV beside a memcpy in the same loop?")
    parser.add_argument("--chunks", type=int, default=4, help="per request, of 32 MiB each (default 4)")
    parser.add_argument("--rounds", type=int, default=9, help="medians are over so many (default 9)")
    parser.add_argument("--threads", type=int, default=1, help="transfer threads of the server (default 1)")
    parser.add_argument("--runs", action=argparse.BooleanOptionalAction, default=True, help="rows for sizes of runs")
    chosen = parser.parse_args()
    rows: list[Row] = []
    pool = f"{(chosen.rounds + 2) * chosen.chunks * 32}MiB"
    for run_kib in GOALS if chosen.runs else ():
        with tempfile.TemporaryDirectory(prefix="lmlive-") as folder:
            flags = ("--pool-bytes", pool, "--transfer-threads", str(chosen.threads))
            async with ServerProcess(*flags, run_dir=Path(folder) / "run") as server:
                rows += await measure(server.url, run_kib, chosen.chunks, chosen.rounds)
    for way, strategy, shared in WAYS:
        with tempfile.TemporaryDirectory(prefix="lmlive-") as folder:
            run_dir = Path(folder) / "run"
            bind = ("--bind", f"ipc://{run_dir}/router.sock", "--bind", "tcp://127.0.0.1:0")
            # A pool that is full, as they are: a worker that maps it has used every part of it before.
            full = f"{FULL_POOL * chosen.chunks * 32}MiB"
            flags = ("--pool-bytes", full, "--transfer-threads", str(chosen.threads), *bind)
            async with ServerProcess(*flags, run_dir=run_dir) as server:
                url = server.ready["bind"].split(",")["tcp" in way]
                rows += await measure(
                    url,
                    LLAMA_KIB,
                    chosen.chunks,
                    chosen.rounds,
                    way=way,
                    strategy=strategy,
                    shared=shared,
                    warm_up=FULL_POOL + 1,
                )
    report(rows, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
