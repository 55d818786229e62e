"""How many requests may be in flight: the server's limit, kept on this side so that it need not refuse. One loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lmlive.errors import ServerBusy


class Slots:
    """A limit that may change when another server answers."""

    def __init__(self) -> None:
        self._limit = 0
        self._free = asyncio.Semaphore(0)

    @asynccontextmanager
    async def one(self, limit: int, patience: float) -> AsyncIterator[None]:
        """Hold one of ``limit`` slots.

        Raises:
            ServerBusy: None came free within so many seconds.
        """
        if self._limit != limit:
            self._limit, self._free = limit, asyncio.Semaphore(max(1, limit))
        free = self._free
        try:
            async with asyncio.timeout(max(0.0, patience)):
                await free.acquire()
        except TimeoutError:
            raise ServerBusy("as many requests as the server takes are in flight", limit=limit) from None
        try:
            yield
        finally:
            free.release()
