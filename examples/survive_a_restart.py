"""The server dies and comes back; the worker registers again by itself."""

import asyncio
import tempfile

import lmlive
from lmlive.testing import ServerProcess


async def main() -> None:
    """Run the example."""
    run_dir = tempfile.mkdtemp(prefix="lmlive-")
    prompt, blocks = list(range(512)), list(range(32))
    config = lmlive.WorkerConfig(heartbeat_interval=0.5, heartbeat_timeout=0.5)
    cache = lmlive.shared_empty((2, 64, 16, 2, 32), "float32")

    async with ServerProcess("--pool-bytes", "64MiB", run_dir=run_dir) as server:
        worker = lmlive.Worker(
            server.url, kv_caches={"l": cache}, block_tokens=16, model="tiny", block_axis=1, config=config
        )
        await worker.__aenter__()
        print("stored", await worker.store(prompt, blocks))
        server.kill()
        await server.wait()
        print("without a server:", (await worker.retrieve(prompt, blocks)).reason)

    async with ServerProcess("--pool-bytes", "64MiB", run_dir=run_dir):
        while not worker.healthy:
            await asyncio.sleep(0.05)
        print("with the new one:", (await worker.retrieve(prompt, blocks)).reason)
        print("stored again", await worker.store(prompt, blocks))
        await worker.__aexit__(None, None, None)


asyncio.run(main())
