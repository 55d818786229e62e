"""A worker or a scheduler in a process of its own, to be killed: it does what it is told on stdin, line by line.

``python -m tests.processes.kv_peer URL worker|scheduler [CONFIG]``: after a first line that says who it is, each line
it is given is one word and gets one line of JSON. ``Puppet`` is the other side of this.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import lmlive
from lmlive.worker.own_memory import OwnMemory

CHUNK = 64
BLOCK = 16
TOKENS = list(range(1000, 1000 + 2 * CHUNK))
BLOCKS = list(range(2 * CHUNK // BLOCK))
SHAPE = (2, 32, BLOCK, 2, 8)
ROOT = str(Path(__file__).parents[2])


def content() -> Any:
    """Give what a worker's cache holds."""
    return np.random.default_rng(11).standard_normal(SHAPE).astype(np.float32)


class Puppet:
    """The process, and what it says.

    Attributes:
        hello: What it said first.
        process: It.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.hello: dict[str, Any] = {}
        self.process = process

    def tell(self, word: str) -> None:
        """Give it something to do; ``hear`` waits for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n".encode())

    async def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(15):
            line = await self.process.stdout.readline()
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    async def ask(self, word: str) -> dict[str, Any]:
        self.tell(word)
        return await self.hear()

    async def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.process.kill()
        await self.process.communicate()


@contextlib.asynccontextmanager
async def puppet(
    url: str, role: str, *, under: Sequence[str] = (), build: Sequence[str] = (), **config: object
) -> AsyncIterator[Puppet]:
    """Start one; it is killed at the latest when this is left.

    Args:
        url: Its server's.
        role: "worker" or "scheduler".
        under: The command that starts the interpreter, as ``unshare``.
        build: The module that runs ours, and its arguments.
        config: Its settings.
    """
    command = (*under, sys.executable, "-m", *build, "tests.processes.kv_peer", url, role, json.dumps(config))
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "PYTHONPATH": ROOT},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    one = Puppet(process)
    try:
        one.hello = await one.hear()
        yield one
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def hang(*_: object) -> bool:
    """Copy nothing, for ever."""
    say(copying=True)
    threading.Event().wait()
    return False


def say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


async def be_worker(url: str, config: lmlive.WorkerConfig) -> None:
    memory = lmlive.shared_empty(SHAPE, "float32")
    memory[:] = content()
    schedulers = []  # as long as this process lives, which is killed
    async with lmlive.Worker(
        url, kv_caches={"kv": memory}, block_tokens=BLOCK, model="m", block_axis=1, config=config
    ) as worker:
        say(instance_id=worker.instance_id, generation=worker.generation)
        while word := await next_word():
            if word == "store":
                stored = await worker.store(TOKENS, BLOCKS)
                say(tokens=stored.tokens, chunks=stored.chunks, reason=stored.reason)
            elif word == "hang":  # in the middle of its own copies, from now on
                for name in ("gather", "scatter"):
                    setattr(OwnMemory, name, hang)
                say(hangs=True)
            elif word == "ping":
                say(pong=await worker.ping())
            elif word == "state":
                say(healthy=worker.healthy, generation=worker.generation, stats=worker.stats())
            elif word == "lookup":  # its own scheduler's, as in an engine of one process
                schedulers.append(await lmlive.Scheduler(url, model="m", config=config).__aenter__())
                found = await schedulers[-1].lookup(TOKENS)
                say(tokens=found.tokens, lease=found.lease)
            elif word.startswith("freeze"):  # a call into C that keeps the GIL, as a driver's may
                ctypes.PyDLL(None).usleep(int(float(word.removeprefix("freeze")) * 1e6))
                say(frozen=True)
            else:
                loaded = await worker.retrieve(TOKENS, BLOCKS)
                say(tokens=loaded.tokens, reason=loaded.reason)


async def be_scheduler(url: str, config: lmlive.WorkerConfig) -> None:
    async with lmlive.Scheduler(url, model="m", config=config) as scheduler:
        say(healthy=scheduler.healthy)
        while await next_word():
            found = await scheduler.lookup(TOKENS)
            say(tokens=found.tokens, lease=found.lease)


async def next_word() -> str:
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


if __name__ == "__main__":
    settings = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    be = {"worker": be_worker, "scheduler": be_scheduler}[sys.argv[2]]
    asyncio.run(be(sys.argv[1], lmlive.WorkerConfig(**settings)))
