"""What does a server that was stopped cost its callers?

It gets SIGSTOP right after an answer, or when nothing was heard of it for longer than a second. The first call after
that is timed, then many more, and at last how long it takes after SIGCONT until calls work again by themselves.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

from _common import Row, arguments, report

import lmlive
from lmlive.testing import ServerProcess
from lmlive.worker.blocking import BlockingScheduler, BlockingWorker

FIRST_GOAL_MS = 500.0
NEXT_GOAL_US = 1000.0
PROMPT = list(range(600))
BLOCKS = list(range(38))
QUIET = 1.2

Calls = dict[str, Callable[[], Awaitable[str]]]


async def seconds_of(call: Callable[[], Awaitable[str]], good: set[str]) -> float:
    """Time one call that must not go well."""
    begin = time.perf_counter()
    reason = await call()
    took = time.perf_counter() - begin
    if reason in good:
        raise RuntimeError(f"the server was stopped, and a call answered {reason}")
    return took


async def seconds_until_good(call: Callable[[], Awaitable[str]], good: set[str]) -> float:
    """Call until it goes well; give the seconds that took."""
    begin = time.perf_counter()
    while await call() not in good:  # noqa: ASYNC110 - nothing tells when a server answers again but a call
        await asyncio.sleep(0.001)
    return time.perf_counter() - begin


async def ways(url: str) -> tuple[Calls, list[Any]]:
    """Give every kind of call, each with an object of its own, and the objects."""
    cache = {"layer": lmlive.shared_empty((64, 16, 8), "float32")}

    def worker() -> lmlive.Worker:
        return lmlive.Worker(url, kv_caches=cache, block_tokens=16, model="m")

    stores, loads = [await worker().__aenter__() for _ in range(2)]
    asks = await lmlive.Scheduler(url, model="m").__aenter__()
    inner = [BlockingWorker(url, kv_caches=cache, block_tokens=16, model="m") for _ in range(2)]
    asker = BlockingScheduler(url, model="m")
    for one in (*inner, asker):
        await asyncio.to_thread(one.__enter__)

    async def store() -> str:
        return (await stores.store(PROMPT, BLOCKS)).reason

    async def retrieve() -> str:
        return (await loads.retrieve(PROMPT, BLOCKS)).reason

    async def lookup() -> str:
        return (await asks.lookup(PROMPT)).reason

    async def blocking_store() -> str:
        return inner[0].store(PROMPT, BLOCKS).reason

    async def blocking_retrieve() -> str:
        return inner[1].retrieve(PROMPT, BLOCKS).reason

    async def blocking_lookup() -> str:
        return asker.lookup(PROMPT).reason

    found = (store, retrieve, lookup, blocking_store, blocking_retrieve, blocking_lookup)
    return {call.__name__: call for call in found}, [stores, loads, asks, *inner, asker]


async def measure(rounds: int, more: int) -> list[Row]:
    """Stop and continue the server for every kind of call."""
    rows: list[Row] = []
    run_dir = tempfile.mkdtemp(prefix="lmlive-")
    async with ServerProcess("--pool-bytes", "64MiB", run_dir=run_dir) as server:
        calls, objects = await ways(server.url)
        good = {"stored", "present", "loaded", "hit"}
        for name, call in calls.items():
            first: list[float] = []
            after_quiet: list[float] = []
            following: list[float] = []
            back: list[float] = []
            for n in range(2 * rounds):
                await seconds_until_good(call, good)
                quiet = n >= rounds
                await asyncio.sleep(QUIET if quiet else 0.0)
                server.stop()
                (after_quiet if quiet else first).append(await seconds_of(call, good))
                following += [await seconds_of(call, good) for _ in range(more)]
                server.cont()
                back.append(await seconds_until_good(call, good))
            following.sort()
            rows += [
                Row(f"{name}: first call, after an answer", max(first) * 1e3, "ms", FIRST_GOAL_MS, note="worst"),
                Row(f"{name}: first call, after a silence", max(after_quiet) * 1e3, "ms", FIRST_GOAL_MS, note="worst"),
                Row(f"{name}: next calls", statistics.median(following) * 1e6, "us", NEXT_GOAL_US, note="median"),
                Row(f"{name}: next calls, p99", following[int(len(following) * 0.99)] * 1e6, "us"),
                Row(f"{name}: works again after SIGCONT", max(back) * 1e3, "ms", note="worst"),
            ]
        for one in objects:
            closed = one.close()
            if closed is not None:
                await closed
    return rows


def main() -> None:
    """Measure and print."""
    parser = arguments("What does a server that was stopped cost its callers?")
    parser.add_argument("--rounds", type=int, default=3, help="stops of each kind, for each kind of call (default 3)")
    parser.add_argument("--more", type=int, default=200, help="calls after the first one (default 200)")
    chosen = parser.parse_args()
    report(asyncio.run(measure(chosen.rounds, chosen.more)), as_json=chosen.json)


if __name__ == "__main__":
    main()
