"""The second tiers of a running server: opened off the loop, emptied of what waits at its end, closed.

Loop thread only; a tier's own calls run in the tier lane, and its opening and closing in threads of their own.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from lmlive.clock import Clock
from lmlive.config.tiers import DirectoryPlace, tier_place
from lmlive.modules.books import Books
from lmlive.modules.handler import Work
from lmlive.modules.tiers import Tiers
from lmlive.server.lanes import in_thread
from lmlive.server.ports import Workshop
from lmlive.tier.base import Tier
from lmlive.tier.filesystem import FilesystemTier

log = logging.getLogger("lmlive.server")

THREADS: Final = 4
"""Of the tier lane, for each tier: as many as may hang in it at a time, so that no other tier waits for one."""
_LOOK_AGAIN_SECONDS: Final = 0.1

Settle = Callable[[object | None, BaseException | None], None]


def make_tier(url: str, clock: Clock) -> Tier:
    """Make the tier that a url names; nothing is opened."""
    place = tier_place(url)
    if isinstance(place, DirectoryPlace):
        return FilesystemTier(Path(place.path), place.most_bytes, clock)
    from lmlive.tier.valkey import ValkeyTier  # noqa: PLC0415 - an extra

    return ValkeyTier(place, clock)


def open_tiers(urls: Sequence[str], clock: Clock) -> list[Tier]:
    """Open all tiers; blocks, for seconds where one is not there.

    Raises:
        StartError: One can never work; those before it are closed again.
    """
    with contextlib.ExitStack() as undo:
        tiers = []
        for url in urls:
            tier = make_tier(url, clock)
            tier.open()
            undo.callback(tier.close)
            tiers.append(tier)
        undo.pop_all()
        return tiers


class OpenTiers:
    """The tiers between their opening and their closing.

    Args:
        books: The server's state, which learns of them.
        lanes: The lanes.
        tiers: They, open.
    """

    def __init__(self, books: Books, lanes: Workshop, tiers: Sequence[Tier]) -> None:
        self._lanes = lanes
        self._tiers = tiers
        self._changed = asyncio.Event()
        self._together = books.tier = Tiers(books, self._submit, tiers)
        for link in self._together.links:
            log.info("tier open url=%s used_bytes=%s", link.tier.url, link.tier.used_bytes)
            link.look(books)

    def tick(self) -> None:
        """Do what is due."""
        self._together.tick()

    async def flush(self, seconds: float, hurry: asyncio.Event) -> None:
        """Wait until all that waits is saved, but not for longer than that, nor once somebody is in a hurry."""
        self._together.stop_fetching()
        await self._until(lambda: self._together.quiet or hurry.is_set(), seconds)

    async def close(self, seconds: float) -> None:
        """End all; what runs has so many seconds to notice it."""
        self._together.stop()
        closing = [asyncio.ensure_future(in_thread(tier.close)) for tier in self._tiers]
        if closing:
            _, late = await asyncio.wait(closing, timeout=seconds)
            for _ in late:
                log.error("a tier does not close: left to the process's end")
        await self._until(lambda: self._together.idle, seconds)
        self._together.tell_counts()

    def _submit(self, work: Work) -> None:
        self._lanes.submit(replace(work, settle=partial(self._settle, work.settle)))

    def _settle(self, settle: Settle, result: object | None, error: BaseException | None) -> None:
        settle(result, error)
        self._changed.set()

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for what changes when a work settles, seldom otherwise."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self._changed.clear()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), _LOOK_AGAIN_SECONDS)
