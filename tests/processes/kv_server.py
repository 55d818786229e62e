"""A server in a process of its own, one of whose copies can be held up in the middle of a slice.

``python -m tests.processes.kv_server RUN_DIR FIFO COPY AFTER``: of the slices of a "gather" or "scatter", the one after
the first AFTER waits behind the question whether it may be copied, as a memcpy that takes long: until somebody opened
the fifo for writing and closed it. ``kv_held`` is the other side of this.
"""

import asyncio
import os
import sys
from pathlib import Path

import lmlive
from lmlive.device.backend import Chunk, MayContinue, Placement
from lmlive.device.host import HostBackend

CHUNK = 64


class _Host(HostBackend):
    def __init__(self, fifo: Path, copy: str, after: int) -> None:
        super().__init__()
        self._fifo = fifo
        self._copy = copy
        self._left = after

    def gather(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        return super().gather(placement, chunk, self._held("gather", may_continue))

    def scatter(self, placement: Placement, chunk: Chunk, may_continue: MayContinue) -> bool:
        return super().scatter(placement, chunk, self._held("scatter", may_continue))

    def _held(self, copy: str, may_continue: MayContinue) -> MayContinue:
        def held() -> bool:
            if not may_continue():
                return False
            if copy == self._copy:
                self._left -= 1
                if self._left == -1:
                    self._fifo.read_bytes()
            return True

        return held


async def main(run_dir: str, fifo: str, copy: str, after: str) -> None:
    config = lmlive.ServerConfig(run_dir=run_dir, pool_bytes="4MiB", chunk_tokens=CHUNK)
    server = lmlive.LivenessServer(config, backend=_Host(Path(fifo), copy, int(after)))
    async with server:
        sys.stdout.write(
            f"lmlive ready bind={server.url} http=off pid={os.getpid()} epoch={server.epoch:016x} version=0\n"
        )
        sys.stdout.flush()
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
