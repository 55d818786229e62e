"""A partition: what stands between a worker and its server, and lets nothing through while it is cut."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable


class Partition:
    """The middle of every connection through it.

    Attributes:
        whole: Set while it lets everything through.
    """

    def __init__(self) -> None:
        self.whole = asyncio.Event()
        self.whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def passes_to(self, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        """Give the callback of a listener whose connections go on to a port."""

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(connect(reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return accept

    async def close(self) -> None:
        """End what goes through."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while content := await reader.read(65_536):
                await self.whole.wait()
                writer.write(content)
        writer.close()


@contextlib.asynccontextmanager
async def partition(url: str) -> AsyncIterator[tuple[str, Partition]]:
    """Stand before a server's TCP address; give the address to use instead, and what can be cut."""
    between = Partition()
    proxy = await asyncio.start_server(between.passes_to(int(url.rpartition(":")[2])), "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", between
    finally:
        proxy.close()
        await between.close()
