"""A worker's process of another user; prints what it saw as one line of JSON, and goes on until its stdin ends.

It becomes that user after its imports, because an interpreter of root's may be out of reach for anybody else.
"""

import asyncio
import contextlib
import io
import json
import os
import shutil
import sys

from lmlive.cli.command import main
from lmlive.errors import LMLiveError
from lmlive.worker.scheduler import Scheduler
from tests.server.raw import Raw, Tie, memory_file, register
from tests.worker.workers import cache, fast, make

PROMPT = list(range(1000, 1600))
IDS = list(range(38))


async def work(url: str) -> dict[str, object]:
    """Store and retrieve, look up, reap somebody; all that a user may do who is let in."""
    config = fast(request_timeout=5.0, heartbeat_start="register")
    caches = cache()
    before = caches["layer"].copy()
    async with make(url, caches, config=config) as worker, Scheduler(url, model="m", config=config) as scheduler:
        stored = await worker.store(PROMPT, IDS)
        caches["layer"][...] = -1
        found = await scheduler.lookup(PROMPT)
        loaded = await worker.retrieve(PROMPT, IDS, lease=found.lease)
        seen = {
            "healthy": worker.healthy,
            "instance_id": str(worker.instance_id),
            "stored": stored.tokens,
            "found": found.tokens,
            "loaded": loaded.tokens,
            "same": bool((caches["layer"][:32] == before[:32]).all()),
        }
        await say(seen)
    return {}


async def enter(url: str) -> dict[str, object]:
    """Enter, for as long as it takes."""
    for thing in (make(url, {}, config=fast(request_timeout=15.0)), Scheduler(url, model="m", config=fast())):
        try:
            async with thing:
                return {"entered": True}
        except LMLiveError as error:
            told = {"error": type(error).__name__, "text": str(error), "uid": error.fields.get("uid")}
            told["allowed"] = error.fields.get("allowed")
    return told


async def ping(url: str) -> dict[str, object]:
    """Ask on the command line."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = await asyncio.to_thread(main, ["ping", "--url", url, "--timeout", "0.5"])
    return {"status": status, "said": said.getvalue()}


async def unsealed(url: str) -> dict[str, object]:
    """Send memory that its owner could cut short under the server's hands."""
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.truncate(fd, 4 * 4096)
    sealed = memory_file("sealed", 4 * 4096)
    told: dict[str, object] = {}
    async with Raw(url) as raw, Tie(url) as tie:
        await raw.hello()
        for name, memory in (("unsealed", fd), ("sealed", sealed)):
            await tie.offer(memory)
            reply, body = await raw.ask(3, register(), instance_id=7)
            told[name] = [reply.code, str(body[0])]
    return told


async def say(told: dict[str, object]) -> None:
    """Tell the test, and wait until it has looked."""
    sys.stdout.write(f"{json.dumps(told)}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def run() -> None:
    what, url = sys.argv[2:]
    told = await {"work": work, "enter": enter, "unsealed": unsealed, "ping": ping}[what](url)
    if told:
        await say(told)


if __name__ == "__main__":
    assert callable(shutil.which)  # imported for what imports it late
    uid = int(sys.argv[1])
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    asyncio.run(run())
