"""A server and a worker: store a prefix, lose it from the cache, load it back."""

import asyncio
import tempfile

import numpy as np

import lmlive


async def main() -> None:
    """Run the example."""
    run_dir = tempfile.mkdtemp(prefix="lmlive-")
    async with lmlive.LivenessServer(lmlive.ServerConfig(run_dir=run_dir, pool_bytes="64MiB")) as server:
        # Keys and values of one layer: 64 blocks of 16 tokens, 2 heads, 32 numbers each.
        cache = lmlive.shared_empty((2, 64, 16, 2, 32), "float32")
        async with lmlive.Worker(
            server.url, kv_caches={"layers.0": cache}, block_tokens=16, model="tiny", block_axis=1
        ) as worker:
            print(f"instance {worker.instance_id}, generation {worker.generation}, healthy {worker.healthy}")

            prompt = list(range(1_000))  # 3 whole chunks of 256 tokens, and a rest that is not stored
            blocks = list(range(63))  # where the engine keeps them
            cache[:, :63] = np.random.default_rng(0).standard_normal(cache[:, :63].shape)
            before = cache.copy()
            print(await worker.store(prompt, blocks))

            cache.fill(0)
            loaded = await worker.retrieve(prompt, blocks)
            print(loaded)
            assert np.array_equal(cache[:, :48], before[:, :48])  # 768 tokens are 48 blocks


asyncio.run(main())
