"""Valkey or Redis, one server or a cluster, as second tier: through it the servers of several hosts share KV.

A chunk travels in pieces, so that no value is long enough to hold up anybody, neither here nor there. Its head is
written last and names the writer of its pieces: a reader sees a whole chunk or none, whoever else writes the same one.
Everything has a time to live. A server that fails or does not answer is left alone for a while, longer each time; until
then whatever it is asked is a miss at once.

Tier lane threads; the client runs on a loop of its own, in a thread of its own.
"""

import logging
import secrets
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import valkey.asyncio
from valkey.exceptions import ValkeyError

from lmlive.clock import Clock
from lmlive.config.tiers import ValkeyPlace
from lmlive.tier.base import HEAD_BYTES, Bytes, TierCounts, head_fits, is_whole, make_head
from lmlive.tier.loop import LoopThread

log = logging.getLogger("lmlive.server")

PIECE_BYTES: Final = 1 << 20
_AT_ONCE: Final = 4
"""Pieces of one answer."""
_WRITER_BYTES: Final = 8
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_TTL_OF_PIECES: Final = 60
"""Seconds by which the pieces outlive their head: longer than it takes to write them."""
_SIZE_AGE: Final = 1.0
"""Seconds for which what the servers hold is believed."""

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
        self._place = place
        self._clock = clock
        self._loop = LoopThread("lmlive-valkey")
        self._client: Any = None
        self._guard = threading.Lock()
        self._pause = _SHORTEST_PAUSE
        self._closed_until = 0.0
        self._used = 0
        self._used_at = float("-inf")

    @property
    def url(self) -> str:
        """Where it is, without who we are there."""
        return f"valkey://{self._place.host}:{self._place.port}/{self._place.database}"

    @property
    def used_bytes(self) -> int | None:
        """What the servers hold, of whomever; None where that is not asked."""
        return self._used if self._place.most_bytes is not None else None

    def open(self) -> None:
        """Make the client; it connects with the first request."""
        self._loop.start()
        self._loop.ask(self._make_client(), 5.0)

    def find(self, names: Sequence[bytes], deadline: float) -> int:
        """Count how many of these have a head there, from the first on."""
        found = self._ask(self._find(names), deadline)
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

    def close(self) -> None:
        """Let go of every connection."""
        if self._client is not None:
            client, self._client = self._client, None
            try:
                self._loop.ask(client.aclose(), self._place.timeout)
            except (TimeoutError, OSError, ValkeyError) as error:
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
        except (TimeoutError, OSError, ValkeyError) as error:
            self._fail(error)
            return None
        with self._guard:
            self._pause = _SHORTEST_PAUSE
        return answer

    def _fail(self, error: Exception) -> None:
        """Leave it alone for a while; several threads that fail together count once."""
        self.counts.failures += 1
        now = self._clock.now()
        with self._guard:
            if now < self._closed_until:
                return
            pause = self._pause
            self._closed_until = now + pause
            self._pause = min(2 * pause, _LONGEST_PAUSE)
        reason = str(error) or type(error).__name__
        log.warning("tier failed url=%s reason=%s: nothing is asked of it for %.1f s", self.url, reason, pause)

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

    def _head_key(self, name: bytes) -> str:
        return f"{self._place.prefix}:{{{name.hex()}}}"  # all of one chunk lies in one slot of a cluster

    def _piece_keys(self, name: bytes, writer: bytes, nbytes: int) -> list[str]:
        head = self._head_key(name)
        return [f"{head}:{writer.hex()}:{at}" for at in range(-(-nbytes // PIECE_BYTES))]

    async def _find(self, names: Sequence[bytes]) -> int:
        for count, name in enumerate(names):
            if not await self._client.exists(self._head_key(name)):
                return count
        return len(names)

    async def _load(self, name: bytes, into: Bytes, deadline: float) -> bool:
        found = await self._client.get(self._head_key(name))
        if found is None:
            return False
        head, writer = found[:HEAD_BYTES], found[HEAD_BYTES:]
        if len(writer) != _WRITER_BYTES or not head_fits(head, name, into.nbytes):
            return await self._drop(name)
        keys = self._piece_keys(name, writer, into.nbytes)
        for first in range(0, len(keys), _AT_ONCE):
            if self._clock.now() > deadline:
                return False
            pieces = await self._client.mget(keys[first : first + _AT_ONCE])
            for number, piece in enumerate(pieces, first):
                part = into[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
                if piece is None or len(piece) != part.nbytes:
                    return await self._drop(name)
                part[:] = np.frombuffer(piece, np.uint8)
        return is_whole(head, into) or await self._drop(name)

    async def _drop(self, name: bytes) -> bool:
        """Take away the head of what is not whole; its pieces end by themselves."""
        self.counts.corrupt += 1
        await self._client.delete(self._head_key(name))
        return False

    async def _save(self, name: bytes, chunk: Bytes, deadline: float) -> bool | None:
        """Save it: True; False where it is there; None where there is no room or no time."""
        if await self._client.exists(self._head_key(name)):
            return False
        if not await self._has_room(chunk.nbytes):
            return None
        place, writer = self._place, secrets.token_bytes(_WRITER_BYTES)
        for number, key in enumerate(self._piece_keys(name, writer, chunk.nbytes)):
            if self._clock.now() > deadline:
                return None
            piece = chunk[number * PIECE_BYTES : (number + 1) * PIECE_BYTES].tobytes()
            await self._client.set(key, piece, ex=place.ttl + _TTL_OF_PIECES)
        await self._client.set(self._head_key(name), make_head(name, chunk) + writer, ex=place.ttl)
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
