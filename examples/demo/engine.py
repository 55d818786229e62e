"""One engine process of the demo: ``python -m examples.demo.engine URL``.

It takes one JSON command per line on stdin and answers each with one JSON line on stdout.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import torch

import lmlive
from examples.demo.model import BLOCK_TOKENS, NEW_TOKENS, TokenCounter, build_model, build_prompt
from lmlive.integrations.transformers import PagedCache, PrefixEngine

MODEL = "demo-llama"


class FlippingWorker:
    """Stores like a worker, but with the sign of one block's keys and values flipped: the negative control."""

    def __init__(self, worker: lmlive.Worker, paged: PagedCache) -> None:
        self._worker = worker
        self._paged = paged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    async def store(self, token_ids: list[int], block_ids: list[int], **options: Any) -> lmlive.StoreResult:
        """Flip the block in the middle of the first chunks, then store."""
        for tensor in self._paged.kv_caches.values():
            tensor[:, block_ids[64]].neg_()
        return await self._worker.store(token_ids, block_ids, **options)


class Engine:
    """The model, its paged cache, and the worker and scheduler that share it."""

    def __init__(self, url: str, worker: lmlive.Worker, scheduler: lmlive.Scheduler, paged: PagedCache) -> None:
        self.url = url
        self.worker = worker
        self.scheduler = scheduler
        self.paged = paged
        self.model = build_model()
        self.prompt = build_prompt()
        self.counter = TokenCounter(self.model)

    async def hello(self) -> dict[str, Any]:
        """Say who we are."""
        return {"pid": os.getpid(), "instance_id": str(self.worker.instance_id), "generation": self.worker.generation}

    async def generate(self, salt: str = "", flip: bool = False, use_lmlive: bool = True) -> dict[str, Any]:
        """Continue the demo's prompt and count what went through the model."""
        worker: Any = FlippingWorker(self.worker, self.paged) if flip else self.worker
        engine = PrefixEngine(
            self.model, self.paged, worker if use_lmlive else None, self.scheduler if use_lmlive else None
        )
        before = self.counter.tokens
        done = await engine.generate(self.prompt, NEW_TOKENS, salt=salt)
        forwarded = self.counter.tokens - before - (NEW_TOKENS - 1)
        return {
            "tokens": done.tokens,
            "loaded": done.loaded_tokens,
            "forwarded_prompt_tokens": forwarded,
            "stored": done.stored_tokens,
            "first_token_ms": done.first_token_seconds * 1e3,
        }

    async def state(self) -> dict[str, Any]:
        """Tell what the worker library knows."""
        return {"healthy": self.worker.healthy, "generation": self.worker.generation}

    async def store_and_die(self, status_url: str, cache_bytes: int) -> dict[str, Any]:
        """Register a second cache, store all of it, and SIGKILL ourselves when the server shows the STORE in flight.

        Its many small tensors take the server longer to gather than this process takes to end.
        """
        layers, width = 64, 16
        blocks = cache_bytes // (layers * 2 * BLOCK_TOKENS * width * 4)
        caches = {f"layer{n}": lmlive.shared_empty((2, blocks, BLOCK_TOKENS, width), "float32") for n in range(layers)}
        for cache in caches.values():
            cache.fill(1.0)
        inode = memory_inode(caches["layer0"].ctypes.data)
        worker = lmlive.Worker(self.url, kv_caches=caches, block_tokens=BLOCK_TOKENS, model="big", block_axis=1)
        async with worker:
            name = str(worker.instance_id)
            say({"pid": os.getpid(), "instance_id": name, "inode": inode, "bytes": cache_bytes})
            threading.Thread(target=die_in_flight, args=(status_url, name), daemon=True).start()
            tokens, ids = list(range(blocks * BLOCK_TOKENS)), list(range(blocks))
            for turn in itertools.count():  # each time chunks that nobody has stored: else there is nothing to copy
                await worker.store(tokens, ids, salt=f"{name}/{turn}")
        raise RuntimeError("nothing ends the loop but the end of this process")


def die_in_flight(status_url: str, instance_id: str) -> None:
    """Ask ``/status`` again and again; when this instance has work in flight, die."""
    while True:
        with urllib.request.urlopen(status_url, timeout=2.0) as reply:  # noqa: S310 - our own loopback server
            status = json.load(reply)
        if any(row["instance_id"] == instance_id and row["in_flight"] for row in status["instances"]):
            os.kill(os.getpid(), signal.SIGKILL)


def memory_inode(address: int) -> int:
    """Find the inode of the memory mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        begin, end = (int(bound, 16) for bound in fields[0].split("-"))
        if begin <= address < end:
            return int(fields[4])
    raise RuntimeError(f"no mapping holds {address:#x}")


def say(answer: dict[str, Any]) -> None:
    """Answer on stdout."""
    print(json.dumps(answer), flush=True)


async def main(url: str) -> None:
    """Serve commands until stdin ends."""
    model_config = build_model().config
    paged = PagedCache(model_config, num_blocks=256, block_tokens=BLOCK_TOKENS)
    config = lmlive.WorkerConfig(heartbeat_interval=1.0, heartbeat_timeout=1.0)
    worker = lmlive.Worker(
        url, kv_caches=paged.kv_caches, block_tokens=BLOCK_TOKENS, model=MODEL, block_axis=1, config=config
    )
    async with worker, lmlive.Scheduler(url, model=MODEL, config=config) as scheduler:
        engine = Engine(url, worker, scheduler, paged)
        with torch.inference_mode():
            say(await engine.hello())
            while line := await asyncio.to_thread(sys.stdin.readline):
                command = json.loads(line)
                say(await getattr(engine, command.pop("do"))(**command))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
