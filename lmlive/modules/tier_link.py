"""One tier as the loop sees it: whether it works, what must not be read from it, what is on its way to it.

Loop thread only.
"""

import logging
from dataclasses import asdict

from lmlive.errors import LMLiveError
from lmlive.modules.books import Books
from lmlive.modules.events import note
from lmlive.tier.base import Tier, TierCounts

log = logging.getLogger("lmlive.server")


class Link:
    """What is known of a tier.

    Args:
        tier: It; its calls block.

    Attributes:
        failed: Whether it was told that it fails.
        clearing: Marks of the models, or None for all, whose clear is not certain: nothing is read of them meanwhile.
        reading: How many finds and loads are on their way.
        order: What runs one after the other: saves and clears.
        dropped: How many chunks found no place in the line of those to be saved.
        lost: How many were evicted before their turn came.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.failed = False
        self.clearing: dict[bytes | None, int] = {}
        self.reading = 0
        self.order = object()
        self.dropped = 0
        self.lost = 0
        self._told: dict[str, object] = asdict(TierCounts()) | {"dropped": 0, "lost": 0}

    def serves(self, mark: bytes) -> bool:
        """Tell whether what it has of a model may be read."""
        return not self.clearing or (mark not in self.clearing and None not in self.clearing)

    def look(self, books: Books, error: BaseException | None = None) -> None:
        """Tell it once when the tier begins to fail, and once when it is back.

        Args:
            books: The server's state.
            error: What one of its calls raised, which none should.
        """
        if error is not None and not isinstance(error, LMLiveError):
            log.error("tier broken url=%s", self.tier.url, exc_info=error)
        reason = self.tier.failing
        if (reason is not None) == self.failed:
            return
        self.failed = reason is not None
        facts: dict[str, object] = {"tier": self.tier.url}
        if self.failed:
            facts["reason"] = reason
        kind = "tier_failed" if self.failed else "tier_back"
        note(log, logging.WARNING if self.failed else logging.INFO, kind, facts)
        books.emit(kind, **facts)

    def tell_counts(self) -> None:
        """Log what it did so far, if that is more than it was."""
        counts: dict[str, object] = asdict(self.tier.counts) | {"dropped": self.dropped, "lost": self.lost}
        if counts != self._told:
            self._told = counts
            note(log, logging.INFO, "tier", {"url": self.tier.url, "used_bytes": self.tier.used_bytes, **counts})
