"""How soon is a worker back, without anybody's help?

Four ways to lose it: its server is killed and started again, it is stopped for longer than the server's patience, its
connection is cut, and its address leads nowhere (a full listener swallows the attempts to connect) until a server
appears there. Back is: registered at the server, which stamps the event with CLOCK_MONOTONIC; after a cut: its next
request is answered. The beat is a second, so that a run is short; the goals are in beats.

The server is a process of its own, and so is the worker that is stopped; the other workers live here, on one loop, each
with its own heartbeat thread.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
from _common import Row, arguments, report
from _light import Connection

import lmlive
from lmlive.errors import TransportError
from lmlive.protocol.verbs import Verb
from lmlive.testing import ServerProcess

BEAT = 1.0
GOAL = BEAT + 1.0
TIMEOUT = 2.0
SHORT = {"LMLIVE_ALLOW_SHORT_TIMEOUTS": "1"}
PATIENCE = 30.0
CONFIG = {"heartbeat_interval": BEAT, "heartbeat_timeout": BEAT, "heartbeat_start": "register"}

STOPPED_WORKER = f"""
import asyncio, logging, sys
import lmlive
async def main():
    config = lmlive.WorkerConfig(**{CONFIG!r})
    async with lmlive.Worker(sys.argv[1], kv_caches={{}}, block_tokens=16, model="m", config=config):
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def registrations(url: str, count: int) -> list[float]:
    """Wait until a server has registered so many; give when each was, in seconds of CLOCK_MONOTONIC."""

    def look() -> list[float]:
        with Connection(url) as connection:
            events = connection.ask(Verb.EVENTS, [0, 1000])
        return [event["at"] for event in events if event["kind"] == "registered"]

    end = time.monotonic() + PATIENCE
    while True:
        found = await asyncio.to_thread(look)
        if len(found) >= count or time.monotonic() > end:
            return found
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def workers(url: str, count: int) -> AsyncIterator[list[lmlive.Worker]]:
    """Enter workers without memory."""
    made = [
        lmlive.Worker(url, kv_caches={}, block_tokens=16, model="m", config=lmlive.WorkerConfig(**CONFIG))
        for _ in range(count)
    ]
    try:
        for worker in made:
            await worker.__aenter__()
        yield made
    finally:
        await asyncio.gather(*(worker.close() for worker in made))


async def after_a_restart(folder: Path, count: int) -> list[float]:
    """Kill a server and start another one at once; give the seconds from its ready line to each registration."""
    run_dir = folder / "run"
    async with ServerProcess(run_dir=run_dir) as first, workers(first.url, count):
        first.kill()
        await first.wait()
        async with ServerProcess(run_dir=run_dir) as second:
            ready = time.monotonic()
            return [max(0.0, at - ready) for at in await registrations(second.url, count)]


async def after_a_stop(folder: Path) -> list[float]:
    """Stop a worker until it is reaped, and continue it; give the seconds from there to its registration."""
    flags = ("--no-evidence", "--worker-reap-timeout-seconds", str(TIMEOUT))
    async with ServerProcess(*flags, run_dir=folder / "run", environ=SHORT) as server:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", STOPPED_WORKER, server.url)
        try:
            await registrations(server.url, 1)
            child.send_signal(signal.SIGSTOP)
            await _until_reaped(server.url)
            continued = time.monotonic()
            child.send_signal(signal.SIGCONT)
            return [at - continued for at in (await registrations(server.url, 2))[1:]]
        finally:
            child.kill()
            await child.wait()


async def _until_reaped(url: str) -> None:
    with Connection(url) as connection:
        found = await asyncio.to_thread(connection.reaps, 1, PATIENCE)
    if not found:
        raise RuntimeError("the stopped worker was not reaped")


async def after_a_cut(folder: Path) -> list[float]:
    """Cut a worker's connections on their way; give the seconds to the next answer."""
    async with (
        ServerProcess("--bind", "tcp://127.0.0.1:0", run_dir=folder / "run") as server,
        _proxy(server.url) as (url, cut),
        workers(url, 1) as [worker],
    ):
        begin = time.monotonic()
        cut()
        while time.monotonic() < begin + PATIENCE:
            with contextlib.suppress(TransportError):
                await worker.ping()
                return [time.monotonic() - begin]
            await asyncio.sleep(0.01)
        return []


@contextlib.asynccontextmanager
async def _proxy(url: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    open_now: set[asyncio.StreamWriter] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(65_536):
                writer.write(content)
                await writer.drain()
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        open_now.update((writer, back))
        await asyncio.gather(pump(reader, back), pump(there, writer))
        open_now.difference_update((writer, back))

    def cut() -> None:
        for writer in open_now:
            writer.transport.abort()

    proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", cut
    finally:
        proxy.close()
        cut()


async def after_a_black_hole(folder: Path) -> list[float]:
    """Let a worker try an address that swallows its attempts, then serve there; give the seconds to registration."""
    hole = socket.socket()
    hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    hole.bind(("127.0.0.1", 0))
    hole.listen(0)
    url = f"tcp://127.0.0.1:{hole.getsockname()[1]}"
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:  # nobody accepts: what comes after these gets no answer to its first packet
        filler.setblocking(False)
        filler.connect_ex(hole.getsockname())
    config = lmlive.WorkerConfig(**CONFIG, request_timeout=2 * BEAT)
    worker = lmlive.Worker(url, kv_caches={}, block_tokens=16, model="m", config=config)
    async with worker:
        for sock in (*fillers, hole):
            sock.close()
        async with ServerProcess("--bind", url, run_dir=folder / "run") as server:
            ready = time.monotonic()
            return [max(0.0, at - ready) for at in await registrations(server.url, 1)]


def _rows(name: str, waits: list[float], expected: int, goal: float, note: str) -> list[Row]:
    note = f"{len(waits)} of {expected}; {note}"
    if len(waits) < expected:
        return [Row(name, None, "s", goal, note=note)]
    middle, late, last = np.percentile(waits, [50, 99, 100])
    return [Row(f"{name}, last", float(last), "s", goal, note=f"{note}; p50 {middle:.2f} s, p99 {late:.2f} s")]


async def measure(counts: list[int], rounds: int) -> list[Row]:
    """Lose workers in all ways."""
    rows: list[Row] = []
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="lmlive-") as folder:
            waits = await after_a_restart(Path(folder), count)
        rows += _rows(f"server restarted, {count} workers", waits, count, GOAL, "from its ready line")
    for name, way, goal in (
        ("stopped past the timeout, and continued", after_a_stop, GOAL),
        ("connection cut", after_a_cut, GOAL),
        ("address that swallows attempts, then serves", after_a_black_hole, 2 * BEAT),
    ):
        waits = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="lmlive-") as folder:
                waits += await way(Path(folder))
        rows += _rows(name, waits, rounds, goal, f"a beat is {BEAT:g} s")
    return rows


def main() -> None:
    """Measure and print."""
    parser = arguments("How soon is a worker back, without anybody's help?")
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 32, 100], help="for the restart (1 32 100)")
    parser.add_argument("--rounds", type=int, default=5, help="of the other ways (default 5)")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)  # the workers', of what is done to them here
    report(asyncio.run(measure(chosen.workers, chosen.rounds)), as_json=chosen.json)


if __name__ == "__main__":
    main()
