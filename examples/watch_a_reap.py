"""A worker process dies by SIGKILL; the server sees it at once and gives back what it held."""

import asyncio
import signal
import sys
import tempfile

import lmlive

WORKER = """
import asyncio, sys, lmlive

async def main():
    cache = lmlive.shared_empty((2, 64, 16, 2, 32), "float32")
    async with lmlive.Worker(sys.argv[1], kv_caches={"l": cache}, block_tokens=16, model="tiny", block_axis=1):
        print("registered", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def main() -> None:
    """Run the example."""
    config = lmlive.ServerConfig(run_dir=tempfile.mkdtemp(prefix="lmlive-"), pool_bytes="16MiB")
    async with lmlive.LivenessServer(config) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WORKER, server.url, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        await process.stdout.readline()
        for row in server.status().instances:
            print(f"pid {row.pid} {row.state}, evidence {row.evidence}, {row.mapped_bytes} bytes mapped")

        process.send_signal(signal.SIGKILL)
        await process.wait()
        while server.status().instances:
            await asyncio.sleep(0.001)
        status = server.status()
        print(status.liveness.reaps, status.releases)
        assert status.liveness.reaps.exit == 1


asyncio.run(main())
