"""How fast do STORE and RETRIEVE move KV, as the worker sees it, beside a memcpy of the same size in the same loop?

A server process and this process as the worker; every round stores fresh chunks, loads them into other blocks and
copies the same bytes with numpy between two touched memfds, so that noise hits all. Medians of ratios.
A run is the bytes of one block in one plane; the smaller it is, the more often the copy starts anew.

There are two copies to stand beside: one chunk of 32 MiB after the other, as a cache moves them, which the goals are
about; and all at once, where glibc switches to streaming stores above a size of its own and gets faster.
"""

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


def make_cache(run_kib: int, chunks: int) -> dict[str, npt.NDArray[np.int64]]:
    """Give planes of runs of this size, twice as many blocks as the chunks need, filled with random bytes."""
    planes = CHUNK_BYTES * BLOCK_TOKENS // CHUNK_TOKENS // (run_kib << 10)
    blocks = 2 * chunks * CHUNK_TOKENS // BLOCK_TOKENS
    cache = {}
    for plane in range(planes):
        tensor: npt.NDArray[np.int64] = lmlive.shared_empty((blocks, run_kib * 128), "int64")
        tensor[:] = np.random.default_rng(plane).integers(0, 1 << 62, tensor.shape)
        cache[f"plane.{plane}"] = tensor
    return cache


async def measure(url: str, run_kib: int, chunks: int, rounds: int) -> list[Row]:
    """Measure one run size."""
    cache = make_cache(run_kib, chunks)
    blocks = chunks * CHUNK_TOKENS // BLOCK_TOKENS
    source, target = list(range(blocks)), list(range(blocks, 2 * blocks))
    size = blocks * sum(tensor.nbytes // (2 * blocks) for tensor in cache.values())
    left, right = (lmlive.shared_empty((size // 8,), "int64") for _ in range(2))
    left[:] = 1
    right[:] = 2
    step = CHUNK_BYTES // 8
    stores, loads, copies, wholes = [], [], [], []
    config = lmlive.WorkerConfig(request_timeout=60.0)
    async with lmlive.Worker(
        url, kv_caches=cache, block_tokens=BLOCK_TOKENS, model=f"run-{run_kib}", config=config
    ) as worker:
        for round_ in range(rounds + 1):
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
            if round_ == 0:  # warms the mappings on both sides
                continue
            wholes.append(begin - start)
            copies.append(copied - begin)
            stores.append(middle - copied)
            loads.append(end - middle)
        if any(not np.array_equal(tensor[source], tensor[target]) for tensor in cache.values()):
            raise RuntimeError("what was loaded is not what was stored")
    return rows_of(run_kib, size, (copies, wholes), (stores, loads))


def rows_of(
    run_kib: int, size: int, copies: tuple[list[float], list[float]], moves: tuple[list[float], list[float]]
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
        rows.append(Row(f"{name}, runs of {run_kib} KiB", ratio, "memcpy", GOALS[run_kib], at_least=True, note=note))
    return rows


async def main() -> None:
    """Measure and print."""
    parser = arguments("How fast do STORE and RETRIEVE move KV beside a memcpy in the same loop?")
    parser.add_argument("--chunks", type=int, default=4, help="per request, of 32 MiB each (default 4)")
    parser.add_argument("--rounds", type=int, default=9, help="medians are over so many (default 9)")
    parser.add_argument("--threads", type=int, default=1, help="transfer threads of the server (default 1)")
    chosen = parser.parse_args()
    rows: list[Row] = []
    pool = f"{(chosen.rounds + 2) * chosen.chunks * 32}MiB"
    for run_kib in GOALS:
        with tempfile.TemporaryDirectory(prefix="lmlive-") as folder:
            flags = ("--pool-bytes", pool, "--transfer-threads", str(chosen.threads))
            async with ServerProcess(*flags, run_dir=Path(folder) / "run") as server:
                rows += await measure(server.url, run_kib, chosen.chunks, chosen.rounds)
    report(rows, as_json=chosen.json)


if __name__ == "__main__":
    asyncio.run(main())
