"""``Scheduler``: asks what is stored, and keeps it from being evicted until the workers have loaded it.

It registers nothing and sends no sign of life, so it can never be reaped; its tether tells the server when its process
ends, and its leases end with it. A lookup costs ``lookup_timeout`` at most; after one that got no answer, all are
immediate misses until the server answers quickly again. A server that went away is met again without anybody's help.
"""

import asyncio
import functools
import logging
import secrets
from collections import Counter
from types import TracebackType
from typing import Any, Self

from lmlive.clock import MonotonicClock
from lmlive.config import WorkerConfig
from lmlive.errors import (
    InvalidArgument,
    LMLiveError,
    RequestTimeout,
    ServerUnavailable,
    WorkerClosed,
)
from lmlive.protocol.messages import Lookup, LookupReply, Ping, Release, Unregister, parse_reply
from lmlive.protocol.verbs import Verb
from lmlive.worker.blocks import count_tokens
from lmlive.worker.crew import Crew
from lmlive.worker.dealer import DroppableContext
from lmlive.worker.descriptors import check_descriptors
from lmlive.worker.dropped import when_dropped
from lmlive.worker.gate import BreakerGate
from lmlive.worker.hello import ServerFacts
from lmlive.worker.identity import check_identity, check_lease, check_url
from lmlive.worker.link import Link
from lmlive.worker.meeting import Meeting
from lmlive.worker.outcome import MET_ANOTHER, in_words, let_go, retrieve_reason
from lmlive.worker.outlast import outlast
from lmlive.worker.owner import Owner
from lmlive.worker.prompt import Prompt
from lmlive.worker.reply import Reply
from lmlive.worker.results import LookupResult
from lmlive.worker.slots import Slots

log = logging.getLogger("lmlive.worker")

_FAREWELL = 0.5


class Scheduler:
    """Looks up how long a stored prefix is, and leases it.

    **Lifecycle**: ``async with``, once. Entering waits up to ``request_timeout`` for the server, and enters without it
    all the same; ``VersionError``, a refused uid and refused keys raise. ``close`` ends the connection, and with it the
    leases.

    **Concurrency**: the event loop that entered it owns it. A forked child gets ``ForkedProcess``.

    Args:
        url: The server's: ``ipc:///path`` or ``tcp://host:port``.
        model: Name of the model, as its workers registered it.
        revision: Of the weights, likewise.
        world_size: How many ranks must hold a prefix before it counts.
        config: Patience.
    """

    def __init__(
        self, url: str, *, model: str, revision: str = "", world_size: int = 1, config: WorkerConfig | None = None
    ) -> None:
        check_url(url)
        check_identity(model, revision, 0, world_size)
        self._url = url
        self._model = model
        self._revision = revision
        self._world_size = world_size
        self._config = config or WorkerConfig()
        self._clock = MonotonicClock()
        self._secret = secrets.token_bytes(16)
        self._owner = Owner("scheduler")
        self._counters: Counter[str] = Counter()
        self._context: DroppableContext | None = None
        self._link: Link | None = None
        self._gate: BreakerGate | None = None
        self._meeting: Meeting | None = None
        self._crew = Crew(self._clock)
        self._slots = Slots()
        self._background: set[asyncio.Future[Reply]] = set()
        self._entered = False
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """Tell whether it has a server."""
        state = "connected" if self.healthy else "alone" if self._context is not None else "closed"
        return f"<Scheduler {self._model} {state}>"

    @property
    def healthy(self) -> bool:
        """Whether a server answered HELLO and is not known to be gone."""
        return self._meeting is not None and self._meeting.facts is not None

    def stats(self) -> dict[str, int]:
        """Count what happened so far, by name; names that never happened are absent."""
        found = dict(self._counters)
        if self._link is not None:
            found["late_replies"] = self._link.late_replies
        if self._gate is not None:
            found["breaker_opened"] = self._gate.breaker.opened
        return found

    async def lookup(
        self, token_ids: Any, *, adapter: str = "", salt: str = "", lease: str | None = None
    ) -> LookupResult:
        """Ask how long a prefix every rank can load, and lease it.

        Args:
            token_ids: The prompt.
            adapter: As for ``Worker.store``.
            salt: As for ``Worker.store``.
            lease: Renews this one instead of making another.
        """
        link, gate, meeting = self._usable()
        prompt = Prompt(token_ids, count_tokens(token_ids), adapter, salt)
        check_lease(lease)
        deadline = self._clock.now() + self._config.lookup_timeout
        try:
            # Wrong arguments are raised whatever the state of the server.
            await prompt.hash(meeting.facts, self._crew, start_by=deadline)
            found = await self._lookup(link, gate, meeting, prompt, lease=lease, deadline=deadline)
        except InvalidArgument:
            raise
        except LMLiveError as error:
            if isinstance(error, RequestTimeout) or "waited" in error.fields:
                gate.trip()
            found = LookupResult(0, None, retrieve_reason(error))
            failure: LMLiveError | None = error
        else:
            failure = None
        self._counters["lookups"] += 1
        self._counters[f"lookups_{found.reason}"] += 1
        if failure is not None and self._config.strict:
            raise failure
        let_go(failure)
        return found

    async def release(self, lease: str | None) -> bool:
        """End a lease; False if it had ended, or if no server answers within ``lookup_timeout`` (it ends by itself)."""
        link, gate, meeting = self._usable()
        facts = meeting.facts
        if check_lease(lease) is None or lease is None or facts is None or not gate.passes():
            return False
        reply = await self._release(link, facts, lease)
        try:
            return parse_reply(Verb.RELEASE, reply.result()) is True
        except LMLiveError as error:
            if isinstance(error, RequestTimeout) or "waited" in error.fields:
                gate.trip()
            log.info("lease not released reason=%s", in_words(error))
            return False

    async def __aenter__(self) -> Self:
        self._owner.settle_here()
        if self._entered:
            raise WorkerClosed("a scheduler is entered once: make a new one")
        self._entered = True
        check_descriptors()
        read = functools.partial(self._config.read_keys, self._url)
        keys = await self._crew.run(read) if self._config.wants_keys(self._url) else None
        self._context = DroppableContext()
        self._context.keys = keys
        self._dropped = when_dropped(self, "scheduler", self._context.end_soon)
        self._link = Link(self._context, self._url, connect_timeout=self._config.connect_timeout, clock=self._clock)
        self._gate = BreakerGate(self._ping, self._answered_at, self._clock)
        self._meeting = Meeting(
            self._link, self._url, self._clock, secret=self._secret, config=self._config, counters=self._counters
        )
        try:
            self._link.open()
            self._meeting.start()
            if not await self._meeting.wait(self._clock.now() + self._config.request_timeout):
                log.warning("scheduler entered without a server url=%s", self._url)
        except BaseException:
            await self.close()
            raise
        if self._meeting.refusal is not None:
            await self.close()
            raise self._meeting.refusal
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the leases and the connection; idempotent, and complete if cancelled.

        A server that does not answer is not waited for.
        """
        if self._owner.elsewhere:
            return
        self._owner.check()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await outlast(self._closing)

    async def _close(self) -> None:
        context, self._context = self._context, None
        if context is None:
            return
        facts = None if self._meeting is None else await self._meeting.stop()
        if self._link is not None and facts is not None and self._gate is not None and self._gate.passes():
            # Leases end with their owner, and while this process lives only its secret's end says that the owner left.
            now = self._clock.now()
            await self._link.request(
                Verb.UNREGISTER,
                Unregister(self._secret).to_payload(),
                deadline=now + _FAREWELL,
                connect_within=_FAREWELL,
                deadline_ns=facts.deadline_ns(now + self._config.request_timeout),
            )
        if self._gate is not None:
            await self._gate.close()
        if self._meeting is not None:
            self._meeting.drop()
        if self._link is not None:
            self._link.close()
        try:
            await self._crew.run(context.term)
        except WorkerClosed:
            context.term()  # the interpreter ends, so there are no threads: the linger bounds it
        self._crew.close()
        self._dropped.detach()

    # the call

    async def _lookup(
        self, link: Link, gate: BreakerGate, meeting: Meeting, prompt: Prompt, *, lease: str | None, deadline: float
    ) -> LookupResult:
        for last in (False, True):
            facts = meeting.facts
            if facts is None:
                raise ServerUnavailable("no server answered yet, or it went away: it is looked for")
            if not gate.passes():
                raise ServerUnavailable("the server does not answer quickly: calls go out again once it does")
            prompt.check_length(facts)
            keys = await prompt.hash(facts, self._crew, start_by=deadline)
            async with self._slots.one(facts.limits["in_flight"], deadline - self._clock.now()):
                reply = await self._ask(link, facts, keys, lease, deadline)
            if not isinstance(reply.error, MET_ANOTHER) or last:
                break
            await meeting.again(facts, deadline)
        told = LookupReply.from_payload(reply.result())
        return LookupResult(told.tokens, told.lease, told.reason)

    async def _ask(self, link: Link, facts: ServerFacts, keys: bytes, lease: str | None, deadline: float) -> Reply:
        message = Lookup(self._model, self._revision, self._world_size, keys, lease)

        def late(reply: Reply) -> None:
            """Give back at once what was leased for a caller who is gone."""
            if reply.error is None and self._context is not None:
                told = LookupReply.from_payload(reply.payload)
                if told.lease is not None and told.lease != lease:
                    self._counters["late_leases"] += 1
                    release = self._release(link, facts, told.lease)
                    self._background.add(release)
                    release.add_done_callback(self._background.discard)

        return await link.request(
            Verb.LOOKUP,
            message.to_payload(),
            deadline=deadline,
            epoch=facts.epoch,
            deadline_ns=facts.deadline_ns(deadline),
            late=late,
        )

    def _release(self, link: Link, facts: ServerFacts, lease: str) -> asyncio.Future[Reply]:
        """Send a RELEASE; it is waited for as long as a lookup, and may still be done when nobody waits any more."""
        now = self._clock.now()
        return link.request(
            Verb.RELEASE,
            Release(lease).to_payload(),
            deadline=now + self._config.lookup_timeout,
            epoch=facts.epoch,
            deadline_ns=facts.deadline_ns(now + self._config.request_timeout),
        )

    async def _ping(self, patience: float) -> float:
        link, _, _ = self._usable()
        sent_at = self._clock.now()
        self._counters["probes"] += 1
        reply = await link.request(Verb.PING, Ping(None).to_payload(), deadline=sent_at + patience)
        reply.result()
        return self._clock.now() - sent_at

    def _answered_at(self) -> float:
        return self._link.answered_at if self._link is not None else float("-inf")

    def _usable(self) -> tuple[Link, BreakerGate, Meeting]:
        self._owner.check()
        if self._context is None or self._link is None or self._gate is None or self._meeting is None:
            raise WorkerClosed("this scheduler is not open: use it within 'async with'")
        return self._link, self._gate, self._meeting
