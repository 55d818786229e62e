"""Sends messages to a server from several peers at a time, and judges what comes of it.

What must hold, looked at after every few thousand messages: each request with a legible header got one reply and
nothing else got any; the others are counted; the server is alive and answers; a well-behaved worker gets right answers
all the time; nothing is pending, reserved, leased or mapped; descriptors and memory are as before; its log has no
traceback.
"""

import asyncio
import random
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgpack
import zmq

import lmlive
from lmlive.errors import BY_CODE
from lmlive.protocol.codec import HEADER_FORMAT, MAGIC, encode_request
from lmlive.protocol.verbs import Verb
from tests.end_to_end.scene import Cache, plain, prompt
from tests.fuzz.messages import Facts, Message, is_request, make, request_id
from tests.fuzz.subject import CHUNK, WITNESS, Subject
from tests.fuzz.tethers import FuzzTie

PEERS: Final = 5
OUTSTANDING: Final = 40
"""Requests of one peer on their way; a server keeps the replies of one that does not read, but not without end."""
BURST: Final = 100
SECONDS: Final = 10.0
RSS_KIB: Final = 32 << 10
"""By how much a server may grow: its tables of what was have lengths of their own."""
OWN: Final = 1 << 62
"""Numbers of requests from here on are ours, not the fuzz's."""
NO_SETTINGS: Final[Mapping[str, Any]] = {}
_HEADER: Final = struct.Struct(HEADER_FORMAT)


class Finding(AssertionError):
    """Something that must not be.

    Args:
        text: What.
        numbers: Of the messages that may be at fault.
    """

    def __init__(self, text: str, numbers: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.numbers = list(numbers)


@dataclass(slots=True)
class Tally:
    """What was sent and what came."""

    messages: int = 0
    requests: int = 0
    illegible: int = 0
    replies: Counter[str] = field(default_factory=Counter)


class FuzzPeer:
    """One connection that sends what it is given."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], url: str, facts: Facts, tally: Tally) -> None:
        self.facts = facts
        self.expected: dict[int, list[int]] = {}
        self._tally = tally
        self._own = OWN
        self.sock = context.socket(zmq.DEALER)
        self.sock.setsockopt(zmq.LINGER, 0)
        self.sock.connect(url)

    def close(self) -> None:
        """Close it."""
        self.sock.close(0)

    def send(self, number: int, message: Message) -> None:
        """Send one message, and expect its reply."""
        self.sock.send_multipart(message, zmq.NOBLOCK)
        if is_request(message):
            self._tally.requests += 1
            self.expected.setdefault(request_id(message), []).append(number)
        elif number >= 0:
            self._tally.illegible += 1

    def ask(self, verb: Verb, payload: list[object], **header: int) -> None:
        """Send a right request."""
        self._own += 1
        self.send(-1, [encode_request(verb, self._own, payload, **header)])

    def receive(self) -> int:
        """Take and judge what came."""
        count = 0
        while int(self.sock.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frames: list[Any] = self.sock.recv_multipart(zmq.NOBLOCK)
            self._judge(frames)
            count += 1
        return count

    def _judge(self, frames: list[bytes]) -> None:
        if len(frames) != 1 or len(frames[0]) < 49:
            raise Finding(f"a reply of another form: {frames!r}")
        [frame] = frames
        magic, version, kind, code, number, epoch, instance_id, generation, deadline = _HEADER.unpack(frame[:48])
        asked = self.expected.get(number)
        if not asked:
            raise Finding(f"a reply that nobody asked for: {frame!r}")
        at = asked.pop(0)
        if not asked:
            del self.expected[number]
        form = (magic, kind, epoch, deadline) == (MAGIC, 1, self.facts.epoch, 0)
        if not form or version != 1 or (code and code not in BY_CODE):
            raise Finding(f"a header of another form: {frame!r}", [at])
        body = msgpack.unpackb(frame[48:])
        if type(body) is not list:
            raise Finding(f"a body of another form: {frame!r}", [at])
        name = BY_CODE[code].__name__ if code else "ok"
        if code and not (len(body) == 2 and type(body[0]) is str and type(body[1]) is dict):
            raise Finding(f"an error of another form: {frame!r}", [at])
        if name == "InternalError":
            raise Finding(f"an internal error: {body}", [at])
        self._tally.replies[name] += 1
        if instance_id == self.facts.instance_id:
            self.facts.generation = generation
        if not code and len(body) == 4 and type(body[1]) is str:
            self.facts.lease = body[1]


class Witness:
    """A well-behaved worker beside all this, and what it knows to be right."""

    def __init__(self, url: str) -> None:
        self.rounds = 0
        self._cache: Cache = plain(seed=1)
        config = lmlive.WorkerConfig(heartbeat_interval=0.5, request_timeout=15.0, heartbeat_timeout=15.0)
        self.worker = self._cache.worker(url, model=WITNESS, config=config)
        self._tokens = prompt(2 * CHUNK, 5)
        self._here, self._there = list(range(8)), list(range(40, 48))
        self._wanted = self._cache.content(self._here)

    async def look(self) -> None:
        """Store, load, compare, and PING."""
        stored = await self.worker.store(self._tokens, self._here)
        loaded = await self.worker.retrieve(self._tokens, self._there)
        self.rounds += 1
        if stored.reason not in {"stored", "present", "busy", "no_space", "gap"}:
            raise Finding(f"the well-behaved worker could not store: {stored}")
        if loaded.reason not in {"loaded", "miss", "partial"}:
            raise Finding(f"the well-behaved worker could not load: {loaded}")
        if loaded.reason == "loaded" and self._cache.content(self._there) != self._wanted:
            raise Finding("the well-behaved worker loaded something else than it stored")
        if not await self.worker.ping() or not self.worker.healthy:
            raise Finding("the well-behaved worker is not well")


class Fuzz:
    """One run against one server.

    Args:
        subject: The server, serving.
        seed: Of all messages.
    """

    def __init__(self, subject: Subject, seed: int) -> None:
        self.tally = Tally()
        self.tethers = 0
        self._subject = subject
        self._seed = seed
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: list[FuzzPeer] = []
        self._lives = 0

    async def run(
        self, numbers: Sequence[int], *, look_every: int = 2000, tethers: int = 0, said: Callable[[str], None] = print
    ) -> dict[str, Any]:
        """Send the messages of these numbers, and so many packets over tethers; give what happened.

        Raises:
            Finding: Something was wrong.
        """
        subject = self._subject
        witness = Witness(subject.url)
        began = time.monotonic()
        try:
            async with witness.worker:
                await witness.look()
                before = await subject.still()
                peak = 0
                with FuzzTie(subject.url, self._seed) as tie:
                    for start in range(0, len(numbers), look_every):
                        some = numbers[start : start + look_every]
                        self._connect()
                        await self._send(some)
                        packets = tethers * len(some) // max(1, len(numbers))
                        self.tethers += await tie.send(packets)
                        tie.rest()
                        await witness.look()
                        await self._drain()
                        self._disconnect()
                        counts = await self._look(before, some)
                        peak = max(peak, counts["rss_kib"])
                        if start // look_every % 50 == 0:
                            said(f"{start + len(some)} messages, rss {counts['rss_kib']} KiB")
                await witness.look()
                after = await self._same(before)
        finally:
            self._disconnect()
            self._context.term()
        seconds = time.monotonic() - began
        return {
            "messages": self.tally.messages,
            "per_second": round(self.tally.messages / seconds),
            "requests": self.tally.requests,
            "illegible": self.tally.illegible,
            "replies": dict(self.tally.replies.most_common()),
            "tether_packets": self.tethers,
            "rounds_of_the_witness": witness.rounds,
            "rss_kib": [before["rss_kib"], after["rss_kib"], peak],
            "fds": [before["fds"], after["fds"]],
        }

    def _connect(self) -> None:
        """Begin a new life for every peer."""
        for index in range(PEERS):
            self._lives += 1
            rng = random.Random(f"{self._seed}/life/{self._lives}")  # noqa: S311 - no secret, but a seed that repeats
            facts = Facts(self._subject.epoch, rng.randbytes(16), rng.getrandbits(63))
            url = self._subject.tcp if index == PEERS - 1 else self._subject.url
            peer = FuzzPeer(self._context, url, facts, self.tally)
            self._peers.append(peer)
            peer.ask(Verb.HELLO, [1, 1, 1, "fuzz", facts.secret])

    def _disconnect(self) -> None:
        for peer in self._peers:
            peer.close()
        self._peers.clear()

    async def _send(self, numbers: Sequence[int]) -> None:
        ties = [FuzzTie(self._subject.url, self._seed) for _ in self._peers[:4]]
        try:
            for tie, peer in zip(ties, self._peers, strict=False):
                await self._register(tie, peer)
            for start in range(0, len(numbers), BURST):
                for number in numbers[start : start + BURST]:
                    peer = self._peers[number % len(self._peers)]
                    peer.send(number, make(self._seed, number, peer.facts))
                    self.tally.messages += 1
                    if len(peer.expected) > OUTSTANDING:
                        await self._wait(lambda peer=peer: len(peer.expected) <= OUTSTANDING)  # type: ignore[misc]
                for tie, peer in zip(ties, self._peers, strict=False):
                    peer.receive()
                    if not peer.facts.generation:
                        await self._register(tie, peer)
                await asyncio.sleep(0)
        finally:
            for tie in ties:
                tie.close()

    async def _register(self, tie: FuzzTie, peer: FuzzPeer) -> None:
        """Bring memory, so that stores and retrieves have something to do."""
        facts = peer.facts
        facts.secret = random.Random(f"{self._seed}/{facts.secret.hex()}").randbytes(16)  # noqa: S311 - the same
        peer.ask(Verb.HELLO, [1, 1, 1, "fuzz", facts.secret])
        peer.ask(Verb.REGISTER, await tie.offer_memory(facts), instance_id=facts.instance_id)
        await self._wait(lambda: not peer.expected)

    async def _wait(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            if not sum(peer.receive() for peer in self._peers):
                if time.monotonic() > end:
                    missing = [at for peer in self._peers for numbers in peer.expected.values() for at in numbers]
                    raise Finding(f"no reply to {len(missing)} requests", missing)
                if not self._subject.alive:
                    raise Finding(f"the server is gone:\n{self._subject.log[-5000:]}")
                await asyncio.sleep(0.0005)

    async def _drain(self) -> None:
        """Wait for all replies, and for a PING's after them: what comes on top is too much."""
        await self._wait(lambda: not any(peer.expected for peer in self._peers))
        for peer in self._peers:
            peer.ask(Verb.PING, [None])
        await self._wait(lambda: not any(peer.expected for peer in self._peers))

    async def _look(self, before: dict[str, int], numbers: Sequence[int]) -> dict[str, int]:
        """Look whether the server is as it must be."""
        subject = self._subject
        await subject.ask("sweep")
        try:
            counts = await subject.still()
        except AssertionError as error:
            raise Finding(str(error), numbers) from error
        wrong = {
            "illegible messages that were counted": (counts["bad_frames"] - before["bad_frames"], self.tally.illegible),
            "dropped replies": (counts["dropped"], before["dropped"]),
            "internal errors": (counts["internal_errors"], 0),
            "broken rules": (counts["broken_rules"], 0),
            "leased chunks": (counts["leased"], 0),
            "mapped generations": (counts["entries"], 1),
            "registrations": (counts["registered"], 1),
            "tracebacks": ("Traceback" in subject.log, False),
        }
        found = {name: values for name, values in wrong.items() if values[0] != values[1]}
        if found or counts["rss_kib"] > before["rss_kib"] + RSS_KIB:
            raise Finding(f"{found} rss={counts['rss_kib']} {subject.log[-3000:]}", numbers)
        return counts

    async def _same(self, before: dict[str, int]) -> dict[str, int]:
        """Wait until the server holds what it held before."""
        names = ("fds", "connections", "tether_sockets", "tethers", "waiting_fds", "chunks", "tasks", "leases")
        end = time.monotonic() + 2 * SECONDS
        while True:
            counts = await self._subject.still()
            left = {name: (counts[name], before[name]) for name in names if counts[name] != before[name]}
            if not left:
                return counts
            if time.monotonic() > end:
                raise Finding(f"something is left: {left}")
            await asyncio.sleep(0.2)


Run = Callable[[Sequence[int]], Awaitable[bool]]
"""Sends these messages to a new server, and tells whether it goes wrong."""


async def shrink(numbers: Sequence[int], fails: Run) -> list[int]:
    """Find few messages that still make it go wrong; one, if one is enough."""
    kept = list(numbers)
    size = max(1, len(kept) // 2)
    while len(kept) > 1:
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            if fewer and await fails(fewer):
                kept = fewer
                size = min(size, max(1, len(kept) // 2))
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
    return kept


async def fuzz(
    run_dir: Path, seed: int, numbers: Sequence[int], *, settings: Mapping[str, Any] = NO_SETTINGS, **options: Any
) -> dict[str, Any]:
    """Start a server, and run."""
    run_dir.mkdir(exist_ok=True)  # noqa: ASYNC240 - nothing else waits here
    async with Subject(run_dir, **{"max_in_flight": 256, "lease_seconds": 30.0, **settings}) as subject:
        return await Fuzz(subject, seed).run(numbers, **options)


async def fuzz_and_shrink(
    run_dir: Path, seed: int, numbers: Sequence[int], *, settings: Mapping[str, Any] = NO_SETTINGS, **options: Any
) -> dict[str, Any]:
    """Run, and where it goes wrong find the message that is at fault."""
    try:
        return await fuzz(run_dir / "0", seed, numbers, settings=settings, **options)
    except Finding as finding:
        runs = 0

        async def fails(fewer: Sequence[int]) -> bool:
            nonlocal runs
            runs += 1
            try:
                await fuzz(run_dir / str(runs), seed, fewer, settings=settings, said=lambda _: None)
            except Finding:
                return True
            return False

        suspects = [number for number in finding.numbers if number >= 0] or list(numbers)
        fault = await shrink(suspects, fails) if await fails(suspects) else suspects[:1]
        facts = Facts(0, bytes(16), 0)
        frames = [make(seed, number, facts)[0][:200].hex() for number in fault[:4]]
        return {"finding": str(finding)[:4000], "seed": seed, "messages": fault[:50], "frames": frames, "runs": runs}
