"""Worker A stores a prefix, worker B finds it with a scheduler's lookup and loads it into other blocks."""

import asyncio
import tempfile

import numpy as np

import lmlive


async def main() -> None:
    """Run the example."""
    config = lmlive.ServerConfig(run_dir=tempfile.mkdtemp(prefix="lmlive-"), pool_bytes="64MiB")
    first = lmlive.shared_empty((2, 64, 16, 2, 32), "float32")
    second = lmlive.shared_empty((2, 200, 16, 2, 32), "float32")  # other block counts share all the same
    prompt = list(range(600))
    async with (
        lmlive.LivenessServer(config) as server,
        lmlive.Worker(server.url, kv_caches={"l": first}, block_tokens=16, model="m", block_axis=1) as a,
        lmlive.Worker(server.url, kv_caches={"l": second}, block_tokens=16, model="m", block_axis=1) as b,
        lmlive.Scheduler(server.url, model="m") as scheduler,
    ):
        first[:] = np.random.default_rng(1).standard_normal(first.shape)
        print("A", await a.store(prompt, list(range(38))))

        found = await scheduler.lookup(prompt)  # pins the chunks until B has loaded them
        print(f"found {found.tokens} tokens")
        count = found.tokens // 16
        blocks = list(range(100, 100 + count))
        print("B", await b.retrieve(prompt[: found.tokens], blocks, lease=found.lease))
        assert np.array_equal(second[:, blocks], first[:, :count])


asyncio.run(main())
