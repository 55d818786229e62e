"""How fast do second tiers save and load chunks, beside a plain loop over files, and what does a cold LOOKUP cost?

The first part calls the tiers by themselves: chunks of 32 MiB (Llama 8B) are saved and loaded, one after the other, and
in the same round the same bytes are written to plain files and read from them. All of it goes through the page cache,
which is what a tier does too; a ratio of 1 is a tier that costs nothing beyond its files. The second part has a real
server with an empty pool: prompts that a server before it has saved are looked up once each, and the time is until the
answer promises all of them. Medians.
"""

import asyncio
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from _common import Row, arguments, report

import lmlive
from lmlive.clock import MonotonicClock
from lmlive.server.tiers import make_tier
from lmlive.testing import ServerProcess
from lmlive.tier.base import Tier

CHUNK_BYTES = 32 << 20
SMALL_BYTES = 256 << 10
BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
PROMPTS = 20
FAR = time.monotonic() + 3600.0
PATIENCE = 30.0

Bytes = npt.NDArray[np.uint8]


def timed(call: Callable[[], object]) -> float:
    """Give the seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def write_plain(path: Path, chunk: Bytes) -> None:
    """Write a file as a plain loop would."""
    with path.open("wb", buffering=0) as file:
        file.write(chunk.data)


def read_plain(path: Path, into: Bytes) -> None:
    """Read it again."""
    with path.open("rb", buffering=0) as file:
        file.readinto(into.data)


def measure(kind: str, tier: Tier, folder: Path, *, nbytes: int, count: int, rounds: int) -> list[Row]:
    """Save and load chunks of one size, each beside a file."""
    chunk = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    into = np.zeros(nbytes, np.uint8)
    seconds: dict[str, list[float]] = {"save": [], "load": [], "write": [], "read": []}
    for round_ in range(rounds + 1):
        names = [bytes([round_]) * 8 + number.to_bytes(24, "big") for number in range(count)]
        paths = [folder / f"{number}" for number in range(count)]
        found: dict[str, float] = dict.fromkeys(seconds, 0.0)
        for name, path in zip(names, paths, strict=True):
            path.unlink(missing_ok=True)
            found["save"] += timed(lambda name=name: must(tier.save(name, chunk, FAR)))  # type: ignore[misc]
            found["write"] += timed(lambda path=path: write_plain(path, chunk))  # type: ignore[misc]
        for name, path in zip(names, paths, strict=True):
            found["load"] += timed(lambda name=name: must(tier.load(name, into, FAR)))  # type: ignore[misc]
            found["read"] += timed(lambda path=path: read_plain(path, into))  # type: ignore[misc]
        must((into == chunk).all())
        must(tier.clear(None, FAR))
        if round_:  # the first one is for warming up
            for name_, value in found.items():
                seconds[name_].append(value)
    size = f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
    rows = []
    for ours, plain in (("save", "write"), ("load", "read")):
        median = statistics.median(seconds[ours])
        ratio = statistics.median(p / o for p, o in zip(seconds[plain], seconds[ours], strict=True))
        what = f"{kind}: {ours}, chunks of {size}"
        rows += [
            Row(what, count * nbytes / median / 1e6, "MB/s"),
            Row(what, count / median, "chunks/s"),
            Row(f"{what}, of a plain file {plain}", ratio, "", note="median of ratios within a round"),
        ]
    return rows


def must(done: object) -> None:
    """Refuse to measure what did not happen."""
    if not done:
        raise RuntimeError("a tier did not do what it was asked")


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[int | None]:
    """Run a server without a disk, and give its port; None where there is none to run."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + PATIENCE
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1.0).close()
                    break
                except OSError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.01)
            yield port
        finally:
            process.kill()


async def cold_lookups(url: str | None, chunks: int) -> list[float]:
    """Give the seconds of LOOKUPs of prompts that only the tier has; without one, that nobody has."""
    cache = {
        "kv": lmlive.shared_empty(
            (chunks * CHUNK_TOKENS // BLOCK_TOKENS, SMALL_BYTES * BLOCK_TOKENS // CHUNK_TOKENS // 8), "int64"
        )
    }
    cache["kv"][:] = np.random.default_rng(1).integers(0, 1 << 62, cache["kv"].shape)
    blocks = list(range(len(cache["kv"])))
    prompts = [list(range(number, number + chunks * CHUNK_TOKENS)) for number in range(PROMPTS)]
    flags = ["--chunk-tokens", str(CHUNK_TOKENS), "--pool-bytes", "1GiB", "--tier-wait-seconds", str(PATIENCE)]
    flags += ["--tier", url] if url else []
    config = lmlive.WorkerConfig(lookup_timeout=PATIENCE, request_timeout=PATIENCE)
    took = []
    with tempfile.TemporaryDirectory() as folder:
        for life in range(2):
            async with ServerProcess(*flags, run_dir=folder) as server:
                async with (
                    lmlive.Worker(
                        server.url, kv_caches=cache, block_tokens=BLOCK_TOKENS, model="m", config=config
                    ) as worker,
                    lmlive.Scheduler(server.url, model="m", config=config) as scheduler,
                ):
                    for tokens in prompts:
                        if not life:
                            must((await worker.store(tokens, blocks)).tokens == len(tokens))
                            continue
                        start = time.perf_counter()
                        found = await scheduler.lookup(tokens)
                        took.append(time.perf_counter() - start)
                        must(found.tokens == (len(tokens) if url else 0))
                server.terminate()
                await server.wait()
    return took


def of_lookups(kind: str, url: str | None) -> list[Row]:
    """Measure LOOKUPs over one tier."""
    rows = []
    for chunks in (1, 4, 16):
        took = asyncio.run(cold_lookups(url, chunks))
        what = f"{kind}: LOOKUP of {chunks} chunks of {SMALL_BYTES >> 10} KiB"
        rows.append(Row(what, statistics.median(took) * 1e3, "ms", note="p50" if url else "p50, a miss"))
        rows.append(Row(what, sorted(took)[int(len(took) * 0.9)] * 1e3, "ms", note="p90"))
    return rows


def main() -> None:
    """Measure and print."""
    parser = arguments(str(__doc__).splitlines()[0])
    parser.add_argument("--chunks", type=int, default=8, help="chunks of 32 MiB in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="where files are written; a temporary directory without")
    options = parser.parse_args()
    clock = MonotonicClock()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.dir) as text:
        folder = Path(text)
        with redis(folder) as port:
            urls: dict[str, str | None] = {"file": f"file://{folder}/kv?size=100GiB", "valkey": None}
            if port is not None:
                urls["valkey"] = f"valkey://127.0.0.1:{port}/0?timeout=30"
            for kind, url in urls.items():
                if url is None:
                    rows.append(Row(f"{kind}: save and load", None, "MB/s", note="no redis-server here"))
                    continue
                tier = make_tier(url, clock)
                tier.open()
                try:
                    rows += measure(kind, tier, folder, nbytes=CHUNK_BYTES, count=options.chunks, rounds=options.rounds)
                    rows += measure(
                        kind, tier, folder, nbytes=SMALL_BYTES, count=options.chunks * 16, rounds=options.rounds
                    )
                finally:
                    tier.close()
            rows += of_lookups("without a tier", None)
            for kind, url in urls.items():
                if url is not None:
                    rows += of_lookups(kind, url)
    report(rows, options.json)


if __name__ == "__main__":
    os.environ.pop("LMLIVE_TIER", None)
    main()
