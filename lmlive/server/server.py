"""``LivenessServer``: a whole server inside somebody's event loop.

It starts the parts in order and takes them down in the reverse order, once. It does nothing to its process: no signal
handlers, no logging configuration, no exit; ``python -m lmlive.server`` does those.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from enum import StrEnum
from functools import partial
from typing import Self, TypeVar

from lmlive.clock import Clock, MonotonicClock
from lmlive.config import ServerConfig
from lmlive.device.backend import DeviceBackend
from lmlive.device.pool import PoolMemory
from lmlive.errors import LMLiveError, ServerDraining, StartError
from lmlive.liveness.target import InstanceLivenessTarget
from lmlive.modules.books import no_pool
from lmlive.modules.handler import Lane
from lmlive.modules.removal import remove
from lmlive.server.assembly import Parts, check_extras
from lmlive.server.curve import DoorKeys, door_keys, open_doors
from lmlive.server.lanes import in_thread
from lmlive.server.ports import MakeDoor
from lmlive.server.status import ServerStatus, Snapshot, read_status
from lmlive.server.tiers import open_tiers
from lmlive.tier.base import Tier

log = logging.getLogger("lmlive.server")

Result = TypeVar("Result")

CUT_OFF_SECONDS = 1.0
"""How long copies that the drain's deadline cut off have to notice it, and descriptors to be closed."""


class State(StrEnum):
    """Where a server stands."""

    NEW = "new"
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    CLOSED = "closed"
    FAILED = "failed"


class LivenessServer:
    """A server on the running loop.

    **Lifecycle**: ``async with`` starts it and returns when it serves; leaving it drains, releases everything and
    closes. ``start``, then ``close`` and ``wait_closed``, do the same by hand. A server is started once.

    **Concurrency**: everything on the loop that started it.

    Args:
        config: The settings; the defaults without.
        targets: The embedder's own liveness targets.
        clock: Reads the time.
        router: Makes the router, for tests without sockets.
        backend: Opens device memory; the one that ``config.device`` names without.
    """

    def __init__(
        self,
        config: ServerConfig | None = None,
        *,
        targets: Sequence[InstanceLivenessTarget] = (),
        clock: Clock | None = None,
        router: MakeDoor | None = None,
        backend: DeviceBackend | None = None,
    ) -> None:
        self.config = config or ServerConfig()
        self.state = State.NEW
        self.epoch = secrets.randbits(64) or 1
        self.http_url: str | None = None
        self.drained = True
        """Whether all that ran ended by itself; False once the drain's deadline cut something off."""
        self._targets = tuple(targets)
        self._clock = clock or MonotonicClock()
        self._make_door = router
        self._backend = backend
        self._started_at = self._clock.now()
        self._parts: Parts | None = None
        self._stack = AsyncExitStack()
        self._pool: PoolMemory | None = None
        self._tiers: Sequence[Tier] = ()
        self._copying = False
        self._closing: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()
        self._hurry = asyncio.Event()

    def __repr__(self) -> str:
        """Name state and addresses."""
        return f"<LivenessServer {self.state} {', '.join(self.urls)}>"

    async def __aenter__(self) -> Self:
        """Start."""
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Drain and close."""
        await self._finish()

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses; once they are bound, with their real ports."""
        return self.config.bind_urls if self._parts is None else self._parts.door.urls

    @property
    def url(self) -> str:
        """The first of them."""
        return self.urls[0]

    def status(self) -> ServerStatus:
        """Give everything the server knows of itself.

        Raises:
            StartError: It was not started.
        """
        return self._read_status().status()

    def _read_status(self) -> Snapshot:
        """Read it and no more, which is what the loop's time is for; another thread makes it a map."""
        if self._parts is None:
            raise StartError("the server has no status before it is started")
        return read_status(self._parts, state=self.state.value, uptime=self._clock.now() - self._started_at)

    # Starting

    async def start(self) -> None:
        """Start, and return when it serves; a start that fails leaves nothing behind.

        Raises:
            ConfigError: A setting needs what is not installed, or a file that cannot be used.
            StartError: It was started before, or something it needs cannot be had.
        """
        if self.state is not State.NEW:
            raise StartError(f"a server starts once, and this one is {self.state.value}: make another one")
        check_extras(self.config)
        self.state = State.STARTING
        self._started_at = self._clock.now()
        try:
            await self._start()
        except BaseException as error:
            self.state = State.FAILED
            await asyncio.shield(self._stack.aclose())
            self._closed.set()
            if isinstance(error, (OSError, MemoryError)) and not isinstance(error, LMLiveError):
                raise StartError(f"the server could not start: {error}") from error
            raise

    async def _start(self) -> None:
        config = self.config
        if config.short_timeouts:
            log.warning("short timeouts are allowed by LMLIVE_ALLOW_SHORT_TIMEOUTS: for tests alone")
        keys = await _to_the_end(partial(door_keys, config))
        parts = Parts(
            config,
            epoch=self.epoch,
            clock=self._clock,
            targets=self._targets,
            backend=self._backend,
            keys=keys,
            make_door=self._make_door,
            status=lambda: self._read_status().to_dict,
        )
        self._stack.push_async_callback(self._close_pool, parts)
        pool = await _to_the_end(self._make_pool)
        self._stack.push_async_callback(self._close_lanes, parts)
        parts.lanes.open()
        self._stack.push_async_callback(in_thread, parts.close_run_dir)
        self._stack.callback(parts.tethers.close)
        await _to_the_end(parts.open_run_dir)
        self._stack.push_async_callback(parts.door.close)
        self._stack.callback(parts.dispatcher.answer_over, None)
        parts.door.open()
        self._parts = parts
        for warning in open_doors(self.urls, keys):
            log.warning("%s", warning)
        parts.tethers.open(parts.door.most_connections)
        # From here on peers are answered, most of them with ServerStarting.
        parts.reaper.start()
        self._stack.push_async_callback(parts.reaper.stop)
        if config.tier:
            self._stack.push_async_callback(self._close_tiers, parts)
            parts.take_tiers(await _to_the_end(self._open_tiers))
        whole = await in_thread(partial(pool.populate, self._goes_on))
        if config.http_address is not None:
            await self._open_http(*config.http_address, keys)
        if not whole or self.state is not State.STARTING:
            raise StartError("the server was closed while it started")
        parts.books.pool = pool.view
        parts.books.share_pool = pool.share
        parts.books.state = "serving"
        self.state = State.SERVING
        log.info("serving bind=%s http=%s epoch=%016x", ",".join(self.urls), self.http_url or "off", self.epoch)

    def _make_pool(self) -> PoolMemory:
        """Reserve the pool's memory; runs in a thread."""
        self._pool = PoolMemory(self.config.pool_bytes)
        return self._pool

    def _open_tiers(self) -> Sequence[Tier]:
        """Open the tiers; runs in a thread."""
        self._tiers = open_tiers(self.config.tier, self._clock)
        return self._tiers

    def _goes_on(self, _: int) -> bool:
        """Tell whether the start was not given up meanwhile; asked in the thread that populates the pool."""
        return self.state is State.STARTING

    async def _open_http(self, host: str, port: int, keys: DoorKeys | None) -> None:
        from lmlive.server.http.http_server import HttpServer  # noqa: PLC0415 - aiohttp is heavy, and an extra

        ours = None if keys is None else keys.for_ourselves
        server = HttpServer(lambda: self._read_status().to_dict, lambda: self.url, host, port, self._clock, keys=ours)
        self._stack.push_async_callback(server.close)
        self.http_url = await server.start()

    # Ending

    async def serve_forever(self) -> None:
        """Serve until ``close``; cancelled, it drains and closes first. Starts the server if nobody did."""
        if self.state is State.NEW:
            await self.start()
        try:
            await self.wait_closed()
        except asyncio.CancelledError:
            await self._finish()
            raise

    def close(self) -> None:
        """Begin to drain; returns at once, and twice is once. ``wait_closed`` waits for the end."""
        if self.state is State.NEW:
            self.state = State.CLOSED
            self._closed.set()
        elif self.state is State.STARTING:
            self.state = State.DRAINING  # its start sees it, and fails
        elif self.state is State.SERVING and self._parts is not None:
            self.state = State.DRAINING
            self._parts.books.state = "draining"
            log.info("draining outstanding=%d", self._parts.dispatcher.outstanding)
            self._closing = asyncio.get_running_loop().create_task(self._close(self._parts), name="lmlive-close")

    def terminate(self) -> None:
        """Close without patience: what still runs is cut off."""
        self._hurry.set()
        self.close()

    async def wait_closed(self) -> None:
        """Wait until everything is closed."""
        await self._closed.wait()

    async def _finish(self) -> None:
        """Close and wait for the end, also when cancelled; that only takes the patience."""
        self.close()
        cancelled = False
        while not self._closed.is_set():
            try:
                await self._closed.wait()
            except asyncio.CancelledError:
                self.terminate()
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

    async def _close(self, parts: Parts) -> None:
        try:
            await parts.reaper.stop()
            patience_ends = asyncio.get_running_loop().time() + self.config.drain_seconds
            self.drained = await self._quiet(parts, self.config.drain_seconds, self._hurry)
            if parts.tiers is not None:
                await parts.tiers.flush(max(patience_ends - asyncio.get_running_loop().time(), 0.0), self._hurry)
            books = parts.books
            for removal in books.roster.remove_all(books.moment()):
                remove(books, removal)
            books.prepared.end_all()
            await self._quiet(parts, CUT_OFF_SECONDS, asyncio.Event())
            await parts.releases.settled()
            parts.tethers.close()
            await parts.discards.settled(CUT_OFF_SECONDS)
            await self._close_tiers(parts)
            await self._close_lanes(parts)
            # A call whose work still runs gets no answer: to its worker that would mean that nothing touches its
            # memory any more. Only the end of this process can say so.
            parts.dispatcher.fail_deferred(lambda: ServerDraining("the server is closed"))
        except Exception:
            log.exception("close failed")
            self.drained = False
        finally:
            try:
                await self._stack.aclose()
            except Exception:
                log.exception("close failed")
            self.state = State.CLOSED
            log.info("closed drained=%s", str(self.drained).lower())
            self._closed.set()

    async def _quiet(self, parts: Parts, seconds: float, hurry: asyncio.Event) -> bool:
        """Wait until all requests are answered, but not for longer than that; tell whether they are."""
        quiet = asyncio.ensure_future(parts.dispatcher.quiet())
        hurried = asyncio.ensure_future(hurry.wait())
        try:
            await asyncio.wait({quiet, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return quiet.done()
        finally:
            quiet.cancel()
            hurried.cancel()
            await asyncio.gather(quiet, hurried, return_exceptions=True)

    async def _close_tiers(self, parts: Parts) -> None:
        if parts.tiers is not None:
            await parts.tiers.close(CUT_OFF_SECONDS)
        else:  # the start was given up while they were opened
            for tier in self._tiers:
                await in_thread(tier.close)

    async def _close_lanes(self, parts: Parts) -> None:
        """End the lanes' threads; what had its time and still runs is left to the process's end."""
        left = await parts.lanes.close(asyncio.get_running_loop().time())
        for work in left:
            log.error("left running lane=%s", work.lane.value)
        self._copying = any(work.lane in {Lane.TRANSFER, Lane.TIER} for work in left)

    async def _close_pool(self, parts: Parts) -> None:
        parts.books.pool = None
        parts.books.share_pool = no_pool
        if self._copying:
            log.error("the pool is not unmapped because a copy still runs: it ends with the process")
        elif self._pool is not None:
            await in_thread(self._pool.close)


async def _to_the_end(call: Callable[[], Result]) -> Result:
    """Run a call in a thread; cancelled, wait for its end all the same, so that what it made can be undone."""
    running = asyncio.ensure_future(in_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
