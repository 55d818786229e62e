"""``Worker``: an engine process's share in the cache.

It puts the parts together and checks arguments; what they do is theirs. Three threads of control never wait for each
other: the engine's loop with its data connection, the heartbeat thread with the control connection, and ZMQ's own.
"""

import asyncio
import functools
import logging
import secrets
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from lmlive.cache.layout import KVLayout
from lmlive.clock import MonotonicClock
from lmlive.config import WorkerConfig
from lmlive.errors import LMLiveError, WorkerClosed
from lmlive.protocol.verbs import Verb
from lmlive.worker.blocks import Shape, check_blocks, check_deadline, count_tokens
from lmlive.worker.crew import Crew
from lmlive.worker.descriptors import check_descriptors
from lmlive.worker.dropped import when_dropped
from lmlive.worker.enrollment import Enrollment, check_layout
from lmlive.worker.identity import check_caches, check_identity, check_lease, check_url
from lmlive.worker.memory import WorkerMemory, prepare
from lmlive.worker.order import Order
from lmlive.worker.outlast import outlast
from lmlive.worker.owner import Owner
from lmlive.worker.parts import Parts
from lmlive.worker.prompt import Prompt
from lmlive.worker.results import BlockId, RetrieveResult, StoreResult
from lmlive.worker.unsettled import Unsettled

log = logging.getLogger("lmlive.worker")


class Worker:
    """Registers a paged KV cache with a server, and stores and retrieves prefixes of it.

    A degraded cache never raises into the engine and never holds it beyond the deadline: it is a result whose
    ``reason`` says what happened (with ``WorkerConfig(strict=True)`` it is raised). Wrong arguments raise
    ``InvalidArgument`` at once, wrong layouts raise when entering.

    **Lifecycle**: ``async with``, once. Entering registers, for up to ``request_timeout``; without a server it enters
    all the same, unhealthy, and registers when the server appears. ``InvalidLayout``, ``VersionError``, ``NotOwner``,
    a refused uid and refused keys (``ServerUnavailable`` with a ``reason``) raise; so does ``ConfigError`` where a key
    cannot be read, too few descriptors are left, or the config says ``mode="server_driven"`` and the server cannot map
    this worker's memory (with "auto" that is liveness only, and one warning). ``close`` waits for calls on their way,
    stops the heartbeat, unregisters, closes. Memory that the server may still write into is named by
    ``unsettled_blocks``, also after ``close``; where the server says that its release is pending, it is kept alive
    until this process ends.

    **Concurrency**: the event loop that entered it owns it. ``instance_id``, ``generation``, ``healthy``,
    ``unsettled_blocks`` and ``stats`` may be read from any thread. A forked child gets ``ForkedProcess``.

    Args:
        url: The server's: ``ipc:///path`` or ``tcp://host:port``.
        kv_caches: Name -> torch tensor or numpy array; or one such dict for each KV group. Empty for liveness only.
        block_tokens: Tokens of one block; or one number for each KV group.
        model: Name of the model; workers of one model, revision and layout share KV.
        block_axis: Which axis of a tensor counts the blocks; or name -> axis.
        revision: Of the weights.
        format: What shapes cannot show: attention backend, packing, engine version.
        rank: Which part of the model this process has.
        world_size: How many parts there are.
        config: Patience, and how KV travels. Its ``device`` "host" is what "auto" comes to in this build: memory of any
            other kind raises ``InvalidLayout``.
    """

    def __init__(
        self,
        url: str,
        *,
        kv_caches: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        block_tokens: int | Sequence[int] = 16,
        model: str,
        block_axis: int | Mapping[str, int] = 0,
        revision: str = "",
        format: str = "",  # noqa: A002 - the public name
        rank: int = 0,
        world_size: int = 1,
        config: WorkerConfig | None = None,
    ) -> None:
        check_url(url)
        check_identity(model, revision, rank, world_size)
        self._url = url
        self._config = config or WorkerConfig()
        self._clock = MonotonicClock()
        self._owner = Owner("worker")
        self._kv_caches = check_caches(kv_caches)
        self._layout_arguments: dict[str, Any] = {
            "block_tokens": block_tokens,
            "block_axis": block_axis,
            "format": format,
        }
        self._enrollment = Enrollment(
            instance_id=uuid.uuid4().int & (2**63 - 1),
            secret=secrets.token_bytes(16),
            model=model,
            revision=revision,
            rank=rank,
            world_size=world_size,
            mode=self._config.mode,
            strategy=self._config.strategy,
        )
        self._crew = Crew(self._clock)
        self._counters: Counter[str] = Counter()
        self._unsettled = Unsettled()
        self._shapes: tuple[Shape, ...] = ()
        self._parts: Parts | None = None
        self._entered = self._open = False
        self._closing: asyncio.Task[None] | None = None
        log.info("worker instance_id=%d model=%s rank=%d url=%s", self.instance_id, model, rank, url)

    def __repr__(self) -> str:
        """Tell who it is and how it is."""
        state = ("healthy" if self.healthy else "unhealthy") if self._open else "closed" if self._entered else "new"
        return f"<Worker {self.instance_id} generation={self.generation} {state}>"

    # facts

    @property
    def instance_id(self) -> int:
        """The random number by which the server knows this worker."""
        return self._enrollment.instance_id

    @property
    def generation(self) -> int:
        """The server's number for the present registration; 0 before the first one."""
        return self._parts.heart.view.cell.generation if self._parts is not None else 0

    @property
    def healthy(self) -> bool:
        """Whether the server answers and knows this worker; False makes stores drops and retrieves misses."""
        return self._parts is None or self._parts.heart.healthy

    @property
    def unsettled_blocks(self) -> frozenset[BlockId]:
        """Blocks that the server may write into, now or later: ids, or (group, id) with several KV groups.

        Those of retrieves on their way, and of results in doubt that are not settled. Their contents are not to be
        relied on, and they are not to be reused.
        """
        return self._unsettled.blocks

    def stats(self) -> dict[str, int]:
        """Count what happened so far, by name; names that never happened are absent."""
        found = dict(self._counters)
        if self._parts is not None:
            found |= self._parts.heart.counters
            found["late_replies"] = self._parts.heart.late_replies + self._parts.exchange.link.late_replies
            found["breaker_opened"] = self._parts.gate.breaker.opened
        return found

    # calls

    async def store(
        self,
        token_ids: Any,
        block_ids: Any,
        *,
        skip_tokens: int = 0,
        adapter: str = "",
        salt: str = "",
        deadline: float | None = None,
    ) -> StoreResult:
        """Store the whole chunks of a prompt whose KV is in these blocks.

        Args:
            token_ids: The prompt; it must stay as it is until the call returns, as the blocks must.
            block_ids: Ids of its blocks, from token 0; or one such list for each KV group. Between floor and ceil of
                tokens / block_tokens.
            skip_tokens: Blocks before this token are not read; a multiple of block_tokens.
            adapter: Name of the adapter that computed the KV.
            salt: Keeps tenants apart.
            deadline: Seconds of ``time.monotonic()``; ``request_timeout`` from now if None.
        """
        parts = self._usable()
        order = self._order(
            Verb.STORE,
            token_ids,
            block_ids,
            skip_tokens=skip_tokens,
            adapter=adapter,
            salt=salt,
            deadline=deadline,
        )
        parts.heart.begin()
        return await parts.transfers.store(order)

    async def retrieve(
        self,
        token_ids: Any,
        block_ids: Any,
        *,
        skip_tokens: int = 0,
        adapter: str = "",
        salt: str = "",
        deadline: float | None = None,
        lease: str | None = None,
    ) -> RetrieveResult:
        """Load the longest stored prefix of a prompt into these blocks; whole chunks only.

        A result with the reason ``in_doubt`` says that the server may still write: all its blocks count as failed, and
        none is to be reused before ``await result.settled``.

        Args:
            token_ids: The prompt.
            block_ids: As for ``store``; each block that is written must be named once.
            skip_tokens: Blocks before this token are not written; a multiple of block_tokens.
            adapter: As for ``store``.
            salt: As for ``store``.
            deadline: As for ``store``.
            lease: Of a lookup of the same prompt.
        """
        parts = self._usable()
        order = self._order(
            Verb.RETRIEVE,
            token_ids,
            block_ids,
            skip_tokens=skip_tokens,
            adapter=adapter,
            salt=salt,
            deadline=deadline,
            lease=lease,
        )
        parts.heart.begin()
        return await parts.transfers.retrieve(order)

    async def ping(self) -> bool:
        """Ask the server for an answer, as a sign of life; True.

        Raises:
            RequestTimeout: None came within ``heartbeat_timeout``.
            ServerUnavailable: Nobody serves at this address.
        """
        await self._usable().heart.ping()
        return True

    # life

    async def __aenter__(self) -> Self:
        self._owner.settle_here()
        if self._entered:
            raise WorkerClosed("a worker is entered once: make a new one")
        self._entered = True
        try:
            error = await self._enter()
        except BaseException:
            await self.close()
            raise
        if error is not None:
            await self.close()
            raise error
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for calls on their way, stop the heartbeat, unregister, close; idempotent, and complete if cancelled."""
        if self._owner.elsewhere:
            return  # a forked child has nothing of its own here
        self._owner.check()
        self._open = False
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await outlast(self._closing)

    async def _enter(self) -> LMLiveError | None:
        check_descriptors(memory=sum(map(len, self._kv_caches)))
        read = functools.partial(self._config.read_keys, self._url)
        keys = await self._crew.run(read) if self._config.wants_keys(self._url) else None
        memory = WorkerMemory()
        if any(self._kv_caches):
            layout = KVLayout.from_tensors(self._kv_caches, **self._layout_arguments)
            check_layout(layout)
            memory = await self._prepare(layout)
            self._shapes = tuple(Shape(group.block_tokens, group.num_blocks) for group in layout.groups)
            self._enrollment = self._enrollment.with_memory(layout, memory)
        try:
            self._parts = Parts(
                self._url,
                self._enrollment,
                memory,
                crew=self._crew,
                unsettled=self._unsettled,
                config=self._config,
                keys=keys,
                counters=self._counters,
            )
        except BaseException:
            memory.close()
            raise
        self._dropped = when_dropped(self, "worker", self._parts.ending())
        return await self._parts.enter(self._config.request_timeout)

    async def _prepare(self, layout: KVLayout) -> WorkerMemory:
        """Make the memory shareable off the loop; what was made for a caller who gave up is closed."""
        work = functools.partial(prepare, self._kv_caches, layout, share=self._config.mode != "engine_driven")
        preparing = asyncio.get_running_loop().create_task(self._crew.run(work))
        try:
            return await asyncio.shield(preparing)
        except asyncio.CancelledError:
            (await preparing).close()
            raise

    async def _close(self) -> None:
        if self._parts is None:
            self._crew.close()
            return
        await self._parts.close()
        self._dropped.detach()
        self._kv_caches = []  # nobody who keeps a closed worker keeps its cache

    def _order(
        self,
        verb: Verb,
        token_ids: Any,
        block_ids: Any,
        *,
        skip_tokens: Any,
        adapter: str,
        salt: str,
        deadline: Any,
        lease: Any = None,
    ) -> Order:
        """Check the arguments of a store or retrieve; any thread."""
        tokens = count_tokens(token_ids)
        end = check_deadline(deadline)
        blocks = check_blocks(self._shapes, block_ids, tokens, skip_tokens)
        if verb is Verb.RETRIEVE:
            blocks.check_written_once()
        return Order(
            verb=verb,
            prompt=Prompt(token_ids, tokens, adapter, salt),
            blocks=blocks,
            lease=check_lease(lease),
            deadline=self._clock.now() + self._config.request_timeout if end is None else end,
        )

    def _usable(self) -> Parts:
        self._owner.check()
        if not self._open or self._parts is None:
            raise WorkerClosed("this worker is not open: use it within 'async with'")
        return self._parts
