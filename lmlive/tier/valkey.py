"""Valkey or Redis, one server or a cluster, as second tier: through it the servers of several hosts share KV.

A chunk travels in pieces, so that no value is long enough to hold up anybody, neither here nor there. Its head is
written last and names the writer of its pieces: a reader sees a whole chunk or none, whoever else writes the same one.
Everything has a time to live. A server that fails or does not answer is left alone for a while, longer each time; until
then whatever it is asked is a miss at once.

A clear deletes nothing. What is saved bears two random words that the server keeps, one for the model and one for all;
a clear draws one of them anew, so that nobody finds any more what bears the old one, and its time to live ends it. If
the server loses these words, that is a clear.

Tier lane threads; the client runs on a loop of its own, in a thread of its own.
"""

import logging
import secrets
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import valkey.asyncio
from valkey.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterError,
    NoPermissionError,
    ResponseError,
    ValkeyClusterException,
    ValkeyError,
)

from lmlive.clock import Clock
from lmlive.config.tiers import ValkeyPlace
from lmlive.errors import StartError
from lmlive.tier.base import HEAD_BYTES, MARK_BYTES, Bytes, TierCounts, head_fits, is_whole, make_head
from lmlive.tier.loop import LoopThread

log = logging.getLogger("lmlive.server")

PIECE_BYTES: Final = 1 << 20
_AT_ONCE: Final = 4
"""Pieces of one answer, or of one question."""
_WRITER_BYTES: Final = 8
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_TTL_OF_PIECES: Final = 60
"""Seconds by which the pieces outlive their head: longer than it takes to write them."""
_SIZE_AGE: Final = 1.0
"""Seconds for which what the servers hold is believed."""
_WORDS_AGE: Final = 1.0
"""Seconds for which the words of a model are believed: a clear by another host is seen that much later."""
_WORD_BYTES: Final = 8
_FOUND_AT_ONCE: Final = 64
"""Heads that are looked for in one go."""
_OPEN_SECONDS: Final = 5.0
_ALL: Final = "all"
_MOST_WORDS: Final = 1024
"""Models whose words are remembered."""
_FAULTS: Final = (TimeoutError, OSError, ValkeyError, ValkeyClusterException)
_FOR_EVER: Final = (AuthenticationError, AuthorizationError, NoPermissionError)
"""Faults that do not pass by themselves."""

T = TypeVar("T")


class ValkeyTier:
    """Chunks in a Valkey server.

    **Lifecycle**: ``open`` once, then any calls, ``close``. A server that is not there is no error: it may come.

    Args:
        place: Where.
        clock: For deadlines.
    """

    def __init__(self, place: ValkeyPlace, clock: Clock) -> None:
        self.counts = TierCounts()
        self.failing: str | None = None
        self._place = place
        self._clock = clock
        self._loop = LoopThread("lmlive-valkey")
        self._client: Any = None
        self._guard = threading.Lock()
        self._pause = _SHORTEST_PAUSE
        self._closed_until = 0.0
        self._used = 0
        self._used_at = float("-inf")
        self._words: dict[bytes, tuple[str, float]] = {}  # of each model, and when they were read; the loop thread's
        self._clears = 0

    @property
    def url(self) -> str:
        """Where it is, without who we are there."""
        return f"valkey://{self._place.host}:{self._place.port}/{self._place.database}"

    @property
    def used_bytes(self) -> int | None:
        """What the servers hold, of whomever; None where that is not asked."""
        return self._used if self._place.most_bytes is not None else None

    def open(self) -> None:
        """Make the client, and see whether somebody answers; if not, somebody may come.

        Raises:
            StartError: It answers that it will never serve us: another password, database or kind is needed.
        """
        self._loop.start()
        self._loop.ask(self._make_client(), _OPEN_SECONDS)
        try:
            self._loop.ask(self._client.ping(), _OPEN_SECONDS)
        except _FAULTS as error:
            if not _is_for_ever(error):
                self._fail(error)
                return
            self.close()
            raise StartError(f"tier: {self.url} refuses us: {_reason(error)}", url=self.url) from error

    def find(self, names: Sequence[bytes], deadline: float) -> int:
        """Count how many of these have a head there, from the first on."""
        found = self._ask(self._find(names), deadline) if names else 0
        return found or 0

    def load(self, name: bytes, into: Bytes, deadline: float) -> bool:
        """Load a chunk, piece by piece."""
        loaded = bool(self._ask(self._load(name, into, deadline), deadline))
        if loaded:
            self.counts.loaded += 1
        else:
            self.counts.missed += 1
        return loaded

    def save(self, name: bytes, chunk: Bytes, deadline: float) -> bool:
        """Save a chunk, piece by piece, and its head last."""
        saved = self._ask(self._save(name, chunk, deadline), deadline)
        if saved:
            self.counts.saved += 1
        elif saved is not None:
            return True  # it was there
        else:
            self.counts.refused += 1
        return bool(saved)

    def clear(self, mark: bytes | None, deadline: float) -> bool:
        """Draw a word anew: what bears the old one is found by nobody, here at once and elsewhere within a second."""
        return bool(self._ask(self._clear(mark), deadline))

    def close(self) -> None:
        """Let go of every connection."""
        if self._client is not None:
            client, self._client = self._client, None
            try:
                self._loop.ask(client.aclose(), self._place.timeout)
            except _FAULTS as error:
                log.debug("tier closed without a farewell url=%s reason=%s", self.url, error)
        self._loop.stop()

    # asking

    def _ask(self, work: Coroutine[Any, Any, T], deadline: float) -> T | None:
        """Give what the server answers; None, at once, where it failed a moment ago."""
        now = self._clock.now()
        if now < self._closed_until or now >= deadline or self._client is None:
            work.close()
            return None
        try:
            answer = self._loop.ask(work, deadline - now)
        except _FAULTS as error:
            self._fail(error)
            return None
        with self._guard:
            self._pause = _SHORTEST_PAUSE
            self.failing = None
        return answer

    def _fail(self, error: Exception) -> None:
        """Leave it alone for a while; several threads that fail together count once."""
        self.counts.failures += 1
        now = self._clock.now()
        reason = _reason(error)
        with self._guard:
            self.failing = reason
            if now < self._closed_until:
                return
            pause = self._pause
            self._closed_until = now + pause
            self._pause = min(2 * pause, _LONGEST_PAUSE)
        log.debug("tier url=%s reason=%s: nothing is asked of it for %.1f s", self.url, reason, pause)

    # on the loop

    async def _make_client(self) -> None:
        place = self._place
        known: dict[str, Any] = {
            "host": place.host,
            "port": place.port,
            "username": place.username,
            "password": place.password,
            "ssl": place.tls,
            "socket_timeout": place.timeout,
            "socket_connect_timeout": place.timeout,
        }
        if place.cluster:
            self._client = valkey.asyncio.ValkeyCluster(**known, cluster_error_retry_attempts=1)
        else:
            self._client = valkey.asyncio.Valkey(**known, db=place.database)

    def _head_key(self, name: bytes, words: str) -> str:
        return f"{self._place.prefix}:{{{name.hex()}.{words}}}"  # all of one chunk lies in one slot of a cluster

    def _piece_keys(self, head: str, writer: bytes, nbytes: int) -> list[str]:
        return [f"{head}:{writer.hex()}:{at}" for at in range(-(-nbytes // PIECE_BYTES))]

    @property
    def _words_key(self) -> str:
        return f"{self._place.prefix}:words"

    async def _words_of(self, mark: bytes, *, make: bool = False) -> str | None:
        """Give the words that what is saved of a model bears now; None where there are none, so nothing is."""
        now = self._clock.now()
        known, read_at = self._words.get(mark, ("", float("-inf")))
        if now - read_at < _WORDS_AGE:
            return known
        fields, clears = (_ALL, mark.hex()), self._clears
        found = await self._client.hmget(self._words_key, *fields)
        if None in found and make:
            for field in fields:
                await self._client.hsetnx(self._words_key, field, _new_word())
            found = await self._client.hmget(self._words_key, *fields)
        if None in found:
            return None
        if len(self._words) >= _MOST_WORDS:
            self._words.clear()
        words = "".join(word.hex() for word in found)
        if clears == self._clears:  # else they may be those of before
            self._words[mark] = words, now
        return words

    async def _clear(self, mark: bytes | None) -> bool:
        await self._client.hset(self._words_key, _ALL if mark is None else mark.hex(), _new_word())
        self._clears += 1
        self._words.clear()
        return True

    async def _find(self, names: Sequence[bytes]) -> int:
        words = await self._words_of(names[0][:MARK_BYTES])
        if words is None:
            return 0
        for first in range(0, len(names), _FOUND_AT_ONCE):
            asked = self._client.pipeline(transaction=False)
            for name in names[first : first + _FOUND_AT_ONCE]:
                asked.exists(self._head_key(name, words))
            found = [bool(one) for one in await asked.execute()]
            if not all(found):
                return first + found.index(False)
        return len(names)

    async def _load(self, name: bytes, into: Bytes, deadline: float) -> bool:
        words = await self._words_of(name[:MARK_BYTES])
        if words is None:
            return False
        key = self._head_key(name, words)
        found = await self._client.get(key)
        if found is None:
            return False
        head, writer = found[:HEAD_BYTES], found[HEAD_BYTES:]
        if len(writer) != _WRITER_BYTES or not head_fits(head, name, into.nbytes):
            return await self._drop(key)
        keys = self._piece_keys(key, writer, into.nbytes)
        for first in range(0, len(keys), _AT_ONCE):
            if self._clock.now() > deadline:
                return False
            pieces = await self._client.mget(keys[first : first + _AT_ONCE])
            for number, piece in enumerate(pieces, first):
                part = into[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
                if piece is None or len(piece) != part.nbytes:
                    return await self._drop(key)
                part[:] = np.frombuffer(piece, np.uint8)
        return is_whole(head, into) or await self._drop(key)

    async def _drop(self, head: str) -> bool:
        """Take away the head of what is not whole; its pieces end by themselves."""
        self.counts.corrupt += 1
        await self._client.delete(head)
        return False

    async def _save(self, name: bytes, chunk: Bytes, deadline: float) -> bool | None:
        """Save it: True; False where it is there; None where there is no room or no time."""
        words = await self._words_of(name[:MARK_BYTES], make=True)
        if words is None:  # somebody clears all the time
            return None
        head = self._head_key(name, words)
        if await self._client.exists(head):
            return False
        if not await self._has_room(chunk.nbytes):
            return None
        place, writer = self._place, secrets.token_bytes(_WRITER_BYTES)
        keys = self._piece_keys(head, writer, chunk.nbytes)
        for first in range(0, len(keys), _AT_ONCE):
            if self._clock.now() > deadline:
                return None
            asked = self._client.pipeline(transaction=False)
            for number, key in enumerate(keys[first : first + _AT_ONCE], first):
                piece = chunk[number * PIECE_BYTES : (number + 1) * PIECE_BYTES].tobytes()
                asked.set(key, piece, ex=place.ttl + _TTL_OF_PIECES)
            await asked.execute()
        await self._client.set(head, make_head(name, chunk) + writer, ex=place.ttl)
        return True

    async def _has_room(self, nbytes: int) -> bool:
        most, now = self._place.most_bytes, self._clock.now()
        if most is None:
            return True
        if now - self._used_at > _SIZE_AGE:
            self._used = await self._ask_size()
            self._used_at = now
        self._used += nbytes
        return self._used <= most

    async def _ask_size(self) -> int:
        if not self._place.cluster:
            return int((await self._client.info("memory"))["used_memory"])
        primaries = self._client.get_primaries()
        found = [await self._client.info("memory", target_nodes=node) for node in primaries]
        return sum(int(one["used_memory"]) for one in found)


def _new_word() -> bytes:
    return secrets.token_bytes(_WORD_BYTES)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _is_for_ever(error: BaseException) -> bool:
    """Tell whether a server that answered so to our greeting will do so until somebody changes a setting."""
    for one in _chain(error):
        if isinstance(one, _FOR_EVER) or "Cluster mode is not enabled" in str(one):
            return True
    return isinstance(error, ResponseError) and not isinstance(error, (BusyLoadingError, ClusterError))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
