"""Writing behind: what a STORE has published is saved to a tier, in its own time.

One line for each tier, whose chunks wait by name and not by pin: a slow tier must not keep the pool full. One that was
evicted before its turn came is not saved. What is read just now is pinned, a batch at a time, so that its bytes are not
given to anybody else. The line is bounded, and what does not fit is dropped and counted.

Loop thread, but for ``_save``, which says so.
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from lmlive.cache.checksums import checksum
from lmlive.cache.columns import Chunks
from lmlive.cache.keys import Namespace
from lmlive.clock import Clock
from lmlive.modules.books import Books
from lmlive.modules.handler import Lane, Submit, Work
from lmlive.modules.tier_link import Link
from lmlive.tier.base import Bytes, Tier, chunk_name

MOST_WAITING: Final = 4096
"""Chunks in a line."""
WAITING_SHARE: Final = 0.5
"""Of the pool: what is further behind is evicted before its turn."""
BATCH_CHUNKS: Final = 16
BATCH_BYTES: Final = 8 << 20
"""What is pinned at a time: enough that the loop is seldom asked for more."""
SAVE_SECONDS: Final = 10.0
"""How long one chunk may take."""
_LOOKS: Final = 256
"""Chunks that are looked for in one go."""


class _Waiting(NamedTuple):
    namespace: Namespace
    key: bytes
    nbytes: int


class _Saving(NamedTuple):
    """One chunk, as the lane sees it."""

    namespace: Namespace
    key: bytes
    memory: Bytes
    expected: int | None


class Behind:
    """The line of what is to be saved to one tier.

    Args:
        books: The server's state.
        submit: Runs a work in its lane.
        link: The tier.
    """

    def __init__(self, books: Books, submit: Submit, link: Link) -> None:
        self._books = books
        self._submit = submit
        self._link = link
        self._line: deque[_Waiting] = deque()
        self._bytes = 0
        self._most_bytes = int(books.store.nbytes * WAITING_SHARE)
        self._busy = False
        self._stopped = False

    @property
    def quiet(self) -> bool:
        """Whether nothing waits and nothing is read."""
        return not self._busy and not self._line

    @property
    def idle(self) -> bool:
        """Whether nothing is read."""
        return not self._busy

    def add(self, namespace: Namespace, keys: Sequence[bytes], nbytes: int) -> None:
        """Let chunks wait for their turn, the first of them first."""
        if self._stopped:
            return
        room = min(MOST_WAITING - len(self._line), (self._most_bytes - self._bytes) // nbytes)
        taken = keys[: max(room, not self._line)]
        self._link.dropped += len(keys) - len(taken)
        self._line.extend(_Waiting(namespace, key, nbytes) for key in taken)
        self._bytes += nbytes * len(taken)
        self._next()

    def forget(self, model: str | None) -> None:
        """Save nothing more of a model, or of all, that waits now."""
        kept = [one for one in self._line if model is not None and one.namespace.model != model]
        self._line = deque(kept)
        self._bytes = sum(one.nbytes for one in kept)

    def stop(self) -> None:
        """Save nothing more."""
        self._stopped = True
        self.forget(None)

    def _next(self) -> None:
        """Begin with the next batch, unless one is under way."""
        if self._busy or not self._line:
            return
        store, pool = self._books.store, self._books.pool
        batch: list[_Saving] = []
        chunks: list[Chunks] = []
        left = BATCH_BYTES
        for _ in range(min(len(self._line), _LOOKS)):
            if len(batch) == BATCH_CHUNKS or left <= 0:
                break
            namespace, key, nbytes = self._line.popleft()
            self._bytes -= nbytes
            chunk = store.held(namespace, [key])
            if pool is None or not chunk.size:
                self._link.lost += 1
                continue
            store.pin(chunk)
            start = int(store.offsets(chunk)[0])
            expected = store.checksums(chunk)[0] if self._books.config.checksum else None
            batch.append(_Saving(namespace, key, pool[start : start + nbytes], expected))
            chunks.append(chunk)
            left -= nbytes
        if not batch:
            self._books.later(0.0, self._next)
            return
        self._busy = True
        run = partial(_save, self._link.tier, self._books.clock, batch)
        cost = sum(one.memory.nbytes for one in batch)
        self._submit(Work(Lane.TIER, run, partial(self._saved, chunks), key=self._link.order, cost=cost))

    def _saved(self, chunks: list[Chunks], _: object | None, error: BaseException | None) -> None:
        """Let go of what was read, whatever became of it, and go on."""
        for chunk in chunks:  # one may be among them twice
            self._books.store.unpin(chunk)
        self._busy = False
        self._link.look(self._books, error)
        self._next()


def _save(tier: Tier, clock: Clock, batch: Sequence[_Saving]) -> None:
    """Save chunks that are pinned meanwhile; lane thread."""
    for namespace, key, memory, expected in batch:
        if expected is None or checksum(memory) == expected:
            tier.save(chunk_name(namespace, key), memory, clock.now() + SAVE_SECONDS)
