import asyncio
import subprocess
import sys

import pytest

import lmlive
from lmlive.errors import InvalidArgument
from lmlive.worker.owner import Owner


async def test_the_loop_that_entered_it_owns_it() -> None:
    owner = Owner("worker")
    owner.check()
    owner.settle_here()
    owner.check()

    async def elsewhere() -> None:
        owner.check()

    with pytest.raises(InvalidArgument, match="another event loop, which runs elsewhere"):
        await asyncio.to_thread(asyncio.run, elsewhere())


def test_a_loop_that_was_closed_is_named() -> None:
    owner = Owner("scheduler")

    async def here() -> None:
        owner.settle_here()

    asyncio.run(here())
    with pytest.raises(InvalidArgument, match="this scheduler belongs to another event loop, which was closed"):
        asyncio.run(here())


async def test_calls_from_another_loop_are_refused_and_end(server: object) -> None:
    worker = lmlive.Worker(server.url, kv_caches={}, block_tokens=16, model="m")  # type: ignore[attr-defined]
    async with worker:

        async def elsewhere() -> None:
            for call in (worker.ping, worker.close):
                with pytest.raises(InvalidArgument):
                    await call()

        await asyncio.to_thread(asyncio.run, elsewhere())


DROP = """
import asyncio, gc, sys, warnings
import lmlive
warnings.simplefilter("ignore")

async def enter(make):
    kept = make()
    await kept.__aenter__()
    return kept

for make in (
    lambda: lmlive.Scheduler(sys.argv[1], model="m"),
    lambda: lmlive.Worker(sys.argv[1], kv_caches={}, block_tokens=16, model="m"),
):
    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(enter(make))
    loop.close()
    del kept, loop
    gc.collect()
print("ended")
"""


async def test_dropping_one_whose_loop_is_closed_does_not_hang(run_dir: object) -> None:
    config = lmlive.ServerConfig(run_dir=str(run_dir), pool_bytes="1MiB")
    async with lmlive.LivenessServer(config) as server:
        command = [sys.executable, "-c", DROP, server.url]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=15, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ended\n"
