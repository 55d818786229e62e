"""The second tiers together: what is saved behind, what is fetched before it is needed, what a CLEAR makes of both.

A CLEAR drops what waits to be saved and ends what is being fetched. Then each tier clears in the same order in which it
saves, so that nothing that was saved before comes after. Until a tier has said that it did, nothing is read of it of
that model; one that could not is asked again and again.

Loop thread, but for ``_clear``, which says so.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace
from lmlive.clock import Clock
from lmlive.modules.behind import Behind
from lmlive.modules.books import Books, Cancel
from lmlive.modules.events import note
from lmlive.modules.handler import Lane, Submit, Work
from lmlive.modules.prefetch import Prefetches
from lmlive.modules.tier_link import Link
from lmlive.modules.tier_port import Place
from lmlive.tier.base import Tier, model_mark

log = logging.getLogger("lmlive.server")

COUNTS_SECONDS: Final = 60.0
"""Between two lines that say what the tiers did."""
CLEAR_SECONDS: Final = 10.0
"""How long one clear of one tier may take."""
CLEAR_AGAIN_SECONDS: Final = 5.0


class Tiers:
    """All second tiers of a server; see ``SecondTier``.

    Lifecycle: ``stop`` ends all but what runs in the lane; ``idle`` tells when that has ended.

    Args:
        books: The server's state.
        submit: Runs a work in its lane.
        tiers: They, those first that are asked first; open.
    """

    def __init__(self, books: Books, submit: Submit, tiers: Sequence[Tier]) -> None:
        self._books = books
        self._submit = submit
        self.links = [Link(tier) for tier in tiers]
        self._behind = [Behind(books, submit, link) for link in self.links]
        self._prefetches = Prefetches(books, submit, self.links)
        self._stopped = False
        self._told_refused = 0
        self._counts_due = books.clock.now() + COUNTS_SECONDS

    @property
    def quiet(self) -> bool:
        """Whether nothing waits to be saved, and nothing reads or writes the pool."""
        return all(behind.quiet for behind in self._behind) and self.idle

    @property
    def idle(self) -> bool:
        """Whether no tier reads or writes the pool."""
        return all(behind.idle for behind in self._behind) and not any(link.reading for link in self.links)

    def save(self, namespace: Namespace, keys: Sequence[bytes], chunks: Chunks) -> None:
        """Save chunks that were just committed, some time."""
        nbytes = self._books.store.size_of(chunks)
        for behind in self._behind:
            behind.add(namespace, keys, nbytes)

    def fetch(
        self, places: Sequence[Place], keys: Sequence[bytes], held: int, done: Callable[[], None]
    ) -> Cancel | None:
        """Begin to load what follows the head of a prompt."""
        return self._prefetches.fetch(places, keys, held, done)

    def give_way(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Give up the reservations of these chunks."""
        self._prefetches.give_way(namespace, keys)

    def clear(self, model: str | None, done: Callable[[bool], None]) -> None:
        """Drop a model's chunks, or all."""
        self._prefetches.forget(model)
        for behind in self._behind:
            behind.forget(model)
        mark = None if model is None else model_mark(model)
        outcomes: list[bool] = []

        def count(certain: bool) -> None:
            outcomes.append(certain)
            if len(outcomes) == len(self.links):
                done(all(outcomes))

        for link in self.links:
            link.clearing[mark] = link.clearing.get(mark, 0) + 1
            self._clear(link, mark, count)

    def _clear(self, link: Link, mark: bytes | None, done: Callable[[bool], None]) -> None:
        run = partial(_clear, link.tier, mark, self._books.clock)
        self._submit(Work(Lane.TIER, run, partial(self._cleared, link, mark, done), key=link.order))

    def _cleared(
        self,
        link: Link,
        mark: bytes | None,
        done: Callable[[bool], None],
        certain: object | None,
        error: BaseException | None,
    ) -> None:
        link.look(self._books, error)
        if certain is True:
            link.clearing[mark] -= 1
            if not link.clearing[mark]:
                del link.clearing[mark]
        elif not self._stopped:
            note(log, logging.WARNING, "tier_not_cleared", {"tier": link.tier.url, "again_in": CLEAR_AGAIN_SECONDS})
            self._books.later(CLEAR_AGAIN_SECONDS, partial(self._clear_again, link, mark))
        done(certain is True)

    def _clear_again(self, link: Link, mark: bytes | None) -> None:
        if not self._stopped:
            self._clear(link, mark, _nothing)

    def tick(self) -> None:
        """Say from time to time what the tiers did."""
        now = self._books.clock.now()
        if now >= self._counts_due:
            self._counts_due = now + COUNTS_SECONDS
            self.tell_counts()

    def tell_counts(self) -> None:
        """Say what each tier did, if it did more."""
        for link in self.links:
            link.tell_counts()
        refused = self._prefetches.refused
        if refused > self._told_refused:
            self._told_refused = refused
            note(log, logging.INFO, "tier_busy", {"lookups": refused})

    def stop_fetching(self) -> None:
        """Fetch nothing more."""
        self._prefetches.stop()

    def stop(self) -> None:
        """Save and fetch nothing more; what runs ends by itself, or when its tier is closed."""
        self._stopped = True
        self.stop_fetching()
        for behind in self._behind:
            behind.stop()


def _clear(tier: Tier, mark: bytes | None, clock: Clock) -> bool:
    """Clear one tier; lane thread."""
    return tier.clear(mark, clock.now() + CLEAR_SECONDS)


def _nothing(_: bool) -> None:
    """Nobody waits for it any more."""
