"""Every way in which one request can fail, and the connections over which it does.

Not the counting: that is ``tests.failing_requests``.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

import lmlive
from lmlive.clock import MonotonicClock
from lmlive.protocol.codec import HEADER_BYTES
from lmlive.protocol.verbs import Role, Verb
from lmlive.worker.dealer import Context
from lmlive.worker.hello import say_hello
from lmlive.worker.link import Link
from lmlive.worker.reply import Reply
from tests.end_to_end.peer import keys_of, packed, register
from tests.end_to_end.scene import plain, prompt
from tests.fuzz.subject import CHUNK, Subject, Wrong
from tests.server.raw import BLOCK_BYTES, Tie, memory_file

WINDOW: Final = 32
BLOCKS: Final = 16
PATIENCE: Final = 15.0
SECRET: Final = b"o" * 16
OTHER: Final = b"x" * 16
KEYS: Final = keys_of(prompt(2 * CHUNK, 3))
GOOD: Final = [packed(range(8))]
CLOCK: Final = MonotonicClock()

Ask = Callable[[], Awaitable[str]]
"""Makes one request and names how it ended: an error's type, or a result's reason."""


@dataclass(slots=True)
class Kind:
    """One way to fail.

    Args:
        name: Of the kind.
        ask: Makes one request.
        expected: How each of them must end.
        at_once: How many are on their way at a time.
        before: What the server is told before.
        after: What the server is told afterwards.
        spoil: Makes other frames of those that the library writes; None: they go out as they are.
        late: Whether the reply comes after the request was given up; on a busy machine it may be in time.
    """

    name: str
    ask: Ask
    expected: str
    at_once: int = WINDOW
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    spoil: Callable[[bytes], bytes] | None = None
    late: bool = False


@dataclass(slots=True)
class Side:
    """The worker's side: the connections, and what they hold."""

    subject: Subject
    links: list[Link] = field(default_factory=list)
    workers: list[Any] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Count what could pile up here."""
        exchanges = [worker._parts.exchange for worker in self.workers]
        links = [*self.links, *(exchange.link for exchange in exchanges)]
        return {
            "pending": sum(link.pending for link in links),
            "outbox": sum(len(link._outbox) for link in links),
            "late": sum(len(link._late) for link in links),
            "late_replies": sum(link.late_replies for link in links),
            "bad_frames": sum(link.bad_frames for link in links),
            "unsettled": sum(len(worker.unsettled_blocks) for worker in self.workers),
            "tasks": len(asyncio.all_tasks()),
            "fds": len(list(Path("/proc/self/fd").iterdir())),
        }


class Requests:
    """Makes requests over one connection of the library's."""

    def __init__(self, link: Link, epoch: int, instance_id: int = 7) -> None:
        self.link = link
        self.header = {"epoch": epoch, "instance_id": instance_id, "generation": 0}
        self.registered: list[object] = []

    def one(self, verb: int, payload: list[object], *, within: float = PATIENCE, **header: int) -> Ask:
        """Give what sends this request and names its end."""

        async def ask() -> str:
            reply = await self.send(verb, payload, within=within, **header)
            return type(reply.error).__name__ if reply.error is not None else "ok"

        return ask

    async def send(self, verb: int, payload: list[object], *, within: float = PATIENCE, **header: int) -> Reply:
        """Send a request and wait for its end."""
        return await self.link.request(
            cast("Verb", verb),  # a number that is none, too
            payload,
            deadline=CLOCK.now() + within,
            late=lambda _: None,
            **cast("dict[str, Any]", self.header | header),
        )


@contextlib.asynccontextmanager
async def connected(
    side: Side, secret: bytes | None, *, url: str = "", instance_id: int = 7
) -> AsyncIterator[Requests]:
    """Connect, and say HELLO with a secret if there is one."""
    context = Context()
    link = Link(context, url or side.subject.url, connect_timeout=PATIENCE)
    link.open()
    side.links.append(link)
    try:
        if secret is not None:
            await say_hello(link, CLOCK, role=Role.WORKER, secret=secret, deadline=CLOCK.now() + PATIENCE)
        link.message_bytes = None  # the server is to refuse what is too large, not this side
        yield Requests(link, side.subject.epoch, instance_id)
    finally:
        link.close()
        context.term()


@contextlib.asynccontextmanager
async def the_stage(subject: Subject) -> AsyncIterator[tuple[Side, list[Kind]]]:
    """Connect all that the kinds need."""
    side = Side(subject)
    async with contextlib.AsyncExitStack() as stack:
        mine = await stack.enter_async_context(connected(side, SECRET))
        thief = await stack.enter_async_context(connected(side, OTHER))
        stranger = await stack.enter_async_context(connected(side, None))
        busy = await stack.enter_async_context(connected(side, b"b" * 16, instance_id=8))
        over_tcp = await stack.enter_async_context(connected(side, None, url=subject.tcp))
        tie = await stack.enter_async_context(Tie(subject.url))
        fd = memory_file("lmlive-test", BLOCKS * BLOCK_BYTES)
        await tie.offer(fd, instance_id=7, secret=SECRET)
        os.close(fd)
        registered = await mine.send(Verb.REGISTER, register(SECRET))
        assert registered.header is not None, registered.error
        assert registered.error is None, registered.error
        for one in (mine, thief, stranger):
            one.header["generation"] = registered.header.generation
        bare: list[object] = [b"b" * 16, "m", "", 0, 1, "", "", "none", "auto", [], []]
        known = await busy.send(Verb.REGISTER, bare)
        assert known.header is not None
        busy.header["generation"] = known.header.generation
        worker = await stack.enter_async_context(
            plain(seed=1).worker(subject.url, config=lmlive.WorkerConfig(heartbeat_interval=5.0))
        )
        scheduler = await stack.enter_async_context(
            lmlive.Scheduler(subject.url, model="m", config=lmlive.WorkerConfig(lookup_timeout=PATIENCE))
        )
        side.workers.append(worker)
        assert scheduler._link is not None
        side.links.append(scheduler._link)
        yield side, [*kinds(mine, thief, stranger, busy, over_tcp, tie), *library_kinds(worker, scheduler)]


def kinds(  # noqa: PLR0917 - the connections
    mine: Requests, thief: Requests, stranger: Requests, busy: Requests, over_tcp: Requests, tie: Tie
) -> list[Kind]:
    """List every way in which one request can fail."""
    store: list[object] = [KEYS, GOOD, 0, bytes(16)]
    load: list[object] = [KEYS, GOOD, 0, None]
    twice: list[object] = [KEYS, [packed([0] * 8)], 0, None]
    far: list[object] = [KEYS, [packed([*range(7), 2**32 - 1])], 0, bytes(16)]
    few: list[object] = [KEYS, [packed(range(7))], 0, bytes(16)]
    many_tokens: list[object] = [b"".join(i.to_bytes(32, "big") for i in range(65)), GOOD, 0, bytes(16)]

    def wrong(kind: Wrong) -> list[object]:
        return [b"", int(kind), bytes(16)]

    async def hold() -> str:
        """Fill the limit of the other instance, and ask once more."""
        return await busy_one()

    busy_one = busy.one(Verb.PREPARE_STORE, wrong(Wrong.HELD))

    async def small_handle() -> str:
        fd = memory_file("lmlive-test", BLOCK_BYTES)
        try:
            await tie.offer(fd, instance_id=7, secret=SECRET)
        finally:
            os.close(fd)
        return await mine.one(Verb.REGISTER, register(SECRET, model="other"))()

    internal, invalid = "InternalError", "InvalidPayload"
    return [
        Kind("handler raises in admit", mine.one(Verb.PREPARE_STORE, wrong(Wrong.ADMIT_RAISES)), internal),
        Kind("handler raises in its lane", mine.one(Verb.PREPARE_STORE, wrong(Wrong.LANE_RAISES)), internal),
        Kind("handler raises in settle", mine.one(Verb.PREPARE_STORE, wrong(Wrong.SETTLE_RAISES)), internal),
        Kind("handler forgets to answer", mine.one(Verb.PREPARE_STORE, wrong(Wrong.FORGOTTEN)), internal),
        Kind("settle forgets to answer", mine.one(Verb.PREPARE_STORE, wrong(Wrong.FORGOTTEN_IN_SETTLE)), internal),
        Kind("result cannot be encoded", mine.one(Verb.PREPARE_STORE, wrong(Wrong.NOT_ENCODABLE)), internal),
        Kind("handler answers twice", mine.one(Verb.PREPARE_STORE, wrong(Wrong.ANSWERED_TWICE)), internal),
        Kind("unknown verb", mine.one(99, []), "UnknownVerb"),
        Kind("lease that never was", mine.one(Verb.COMMIT_STORE, ["lease", None]), "UnknownLease"),
        Kind("illegible body", mine.one(Verb.STATUS, []), invalid, spoil=lambda frame: frame[:HEADER_BYTES] + b"\xc1"),
        Kind("illegible ping", mine.one(Verb.PING, [7]), invalid, spoil=lambda frame: frame[:HEADER_BYTES] + b"\xdd"),
        Kind("no body", mine.one(Verb.STORE, store), invalid, spoil=lambda frame: frame[:HEADER_BYTES]),
        Kind("wrong count", mine.one(Verb.PING, [7, None]), invalid),
        Kind("wrong type", mine.one(Verb.STORE, [KEYS, GOOD, True, bytes(16)]), invalid),
        Kind("key twice", mine.one(Verb.STORE, [KEYS[:32] * 2, GOOD, 0, bytes(16)]), invalid),
        Kind("negative deadline", mine.one(Verb.STORE, store, deadline_ns=-1), invalid),
        Kind(
            "another version",
            mine.one(Verb.STORE, store),
            "VersionError",
            spoil=lambda frame: frame[:4] + b"\x02" + frame[5:],
        ),
        Kind("too large", mine.one(Verb.STORE, [bytes(32 * 600), GOOD, 0, bytes(16)]), "MessageTooLarge"),
        Kind("too many tokens", mine.one(Verb.STORE, many_tokens), "MessageTooLarge"),
        Kind("too many blocks", mine.one(Verb.STORE, [KEYS, [packed([0] * 513)], 0, bytes(16)]), "MessageTooLarge"),
        Kind("fenced epoch", mine.one(Verb.STORE, store, epoch=1), "StaleEpoch"),
        Kind("fenced epoch of a lookup", mine.one(Verb.LOOKUP, ["m", "", 1, KEYS, None], epoch=1), "StaleEpoch"),
        Kind("no hello", stranger.one(Verb.STORE, store), "StaleEpoch"),
        Kind("fenced generation", mine.one(Verb.STORE, store, generation=99), "StaleGeneration"),
        Kind("generation 0", mine.one(Verb.RETRIEVE, load, generation=0), "StaleGeneration"),
        Kind("unknown instance", mine.one(Verb.RETRIEVE, load, instance_id=2**64 - 1), "UnknownInstance"),
        Kind("not owner stores", thief.one(Verb.STORE, store), "NotOwner"),
        Kind("not owner registers", thief.one(Verb.REGISTER, [OTHER, *bare_tail()]), "NotOwner"),
        Kind("not owner unregisters", thief.one(Verb.UNREGISTER, [OTHER]), "NotOwner"),
        Kind("no credential", over_tcp.one(Verb.REAP, [7, None]), "NotOwner"),
        Kind("block outside", mine.one(Verb.STORE, far), "InvalidBlocks"),
        Kind("too few blocks", mine.one(Verb.STORE, few), "InvalidBlocks"),
        Kind("block twice", mine.one(Verb.RETRIEVE, twice), "InvalidBlocks"),
        Kind("part of a block skipped", mine.one(Verb.STORE, [KEYS, GOOD, 8, bytes(16)]), "InvalidBlocks"),
        Kind("no cache", busy.one(Verb.STORE, store), "InvalidLayout"),
        Kind("bad layout", mine.one(Verb.REGISTER, register(SECRET, mode="engine_driven")), "InvalidLayout"),
        Kind("bad handle", mine.one(Verb.REGISTER, register(SECRET, handles=[["fd", 9, 65_536]])), "InvalidHandle"),
        Kind("handle smaller than it says", small_handle, "InvalidHandle", at_once=1),
        Kind("past its deadline", mine.one(Verb.STORE, store, deadline_ns=1), "RequestTimeout"),
        Kind(
            "given up before its answer",
            mine.one(Verb.PREPARE_STORE, wrong(Wrong.SLOW), within=0.005),
            "RequestTimeout",
            at_once=4,
            late=True,
        ),
        Kind("unknown lease", mine.one(Verb.RELEASE, ["nothing"]), "ok"),
        Kind("busy", hold, "ServerBusy", before=("fill",), after=("release",)),
        Kind("draining", mine.one(Verb.STORE, store), "ServerDraining", before=("draining",), after=("serving",)),
        Kind("starting", mine.one(Verb.STORE, store), "ServerStarting", before=("starting",), after=("serving",)),
    ]


def bare_tail() -> list[object]:
    """Give a REGISTER without a cache, but for its secret."""
    return ["m", "", 0, 1, "", "", "none", "auto", [], []]


def library_kinds(worker: lmlive.Worker, scheduler: lmlive.Scheduler) -> list[Kind]:
    """List calls of the library that fail: each is a result, and none an exception."""
    tokens = prompt(2 * CHUNK, 9)
    blocks = list(range(8))

    async def load() -> str:
        return (await worker.retrieve(tokens, blocks, lease="nothing")).reason

    async def late_store() -> str:
        return (await worker.store(tokens, blocks, deadline=time.monotonic() - 1)).reason

    async def late_load() -> str:
        return (await worker.retrieve(tokens, blocks, deadline=time.monotonic() - 1)).reason

    async def long_store() -> str:
        return (await worker.store(np.zeros(65 * CHUNK, np.uint32), [0] * 260)).reason

    async def look() -> str:
        return (await scheduler.lookup(tokens, lease="nothing")).reason

    async def release() -> str:
        return str(await scheduler.release("nothing"))

    return [
        Kind("library: lost lease", load, "lease_lost", at_once=1),
        Kind("library: store past its deadline", late_store, "timeout"),
        Kind("library: retrieve past its deadline", late_load, "timeout"),
        Kind("library: too many tokens", long_store, "error"),
        Kind("library: lookup that finds nothing", look, "miss"),
        Kind("library: release of nothing", release, "False"),
    ]
