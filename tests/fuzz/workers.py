"""A server without manners, and the library before it: every call ends as a result or a typed error, and in time."""

import asyncio
import contextlib
import logging
import os
import random
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Self

import msgpack
import zmq

import lmlive
from lmlive.clock import MonotonicClock
from lmlive.errors import LMLiveError, ProtocolError
from lmlive.protocol.codec import decode_header, encode_reply
from lmlive.protocol.messages import parse_reply
from lmlive.protocol.tether import MAX_PACKET_BYTES
from lmlive.protocol.verbs import Verb
from lmlive.server.asker import Asker
from lmlive.worker.memory import parked
from tests.end_to_end.scene import Cache, plain, prompt
from tests.fuzz.messages import Facts, hostile_msgpack
from tests.fuzz.replies import make_reply, result_of
from tests.fuzz.subject import CHUNK

HANGS_SECONDS: Final = 15.0
"""A call that takes so long hangs."""
CONFIG: Final = lmlive.WorkerConfig(
    connect_timeout=0.2, lookup_timeout=0.1, request_timeout=0.2, heartbeat_interval=0.1, heartbeat_timeout=0.1
)
TOKENS: Final = prompt(2 * CHUNK, 1)


class Hostile:
    """A ROUTER and a tether, in a thread, that answer as the seed says."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.path = directory / "router.sock"
        self.url = f"ipc://{self.path}"
        self.replies = 0
        self.civil = 0.5
        """How often it answers as it should."""
        self._rng = random.Random(f"{seed}/hostile")  # noqa: S311 - a seed that repeats, no secret
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._bound.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(self.url)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"{self.path}.tether")
        listener.listen()
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(listener.fileno(), zmq.POLLIN)
        tethers: dict[int, socket.socket] = {}
        self._bound.set()
        while not self._stop.is_set():
            ready = dict(poller.poll(5))
            while router.poll(0):
                self._answer(router, *router.recv_multipart()[:2])
            if listener.fileno() in ready:
                peer, _ = listener.accept()
                self._say(peer, [7])
                tethers[peer.fileno()] = peer
                poller.register(peer.fileno(), zmq.POLLIN)
            for fd in [fd for fd in tethers if fd in ready]:
                if not self._read(tethers[fd]):
                    poller.unregister(fd)
                    tethers.pop(fd).close()
        for peer in tethers.values():
            peer.close()
        listener.close()
        router.close(0)
        context.term()

    def _answer(self, router: zmq.Socket[bytes], peer: bytes, frame: bytes) -> None:
        rng = self._rng
        try:
            header = decode_header(frame)
            verb = Verb(header.code)
        except (ProtocolError, ValueError):
            return
        self.replies += 1
        facts = Facts(7, b"", header.instance_id, rng.choice([1, 1, 1, 1, 0, 2]))
        if rng.random() < self.civil:
            reply = self._right(verb, header.request_id, facts)
        elif rng.random() < 0.15:
            return  # nothing
        else:
            reply = make_reply(rng, verb, header.request_id, facts)
        frames = [reply] if rng.random() < 0.95 else [reply, b"", b"more"]
        for _ in range(1 if rng.random() < 0.95 else 3):
            router.send_multipart([peer, *frames])

    def _right(self, verb: Verb, number: int, facts: Facts) -> bytes:
        payload = result_of(self._rng, verb)
        if verb is Verb.HELLO:
            payload = [
                1,
                CHUNK,
                10.0,
                120.0,
                {"message_bytes": 1 << 20, "tokens": 1 << 20, "blocks": 65_536, "in_flight": 64},
            ]
            payload += [None, time.monotonic_ns()]
        return encode_reply(number, 7, facts.instance_id, facts.generation, payload)

    def _say(self, peer: socket.socket, packet: list[object]) -> None:
        rng = self._rng
        said: bytes = msgpack.packb(packet)
        if rng.random() > self.civil:
            said = rng.choice([hostile_msgpack(rng), rng.randbytes(20), said[:-1], msgpack.packb([24, "no", {}]), b""])
        with contextlib.suppress(OSError):
            peer.send(said)

    def _read(self, peer: socket.socket) -> bool:
        try:
            packet, fds, _, _ = socket.recv_fds(peer, MAX_PACKET_BYTES, 64)
        except OSError:
            return False
        for fd in fds:
            os.close(fd)
        if packet:
            self._say(peer, [len(fds)])
        return bool(packet) and self._rng.random() < 0.9


class Ear(logging.Handler):
    """Hears what the library logs with a traceback: something that it did not foresee."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.heard.append(self.format(record))

    def __enter__(self) -> Self:
        logging.getLogger("lmlive").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("lmlive").removeHandler(self)


class Lives:
    """Workers, schedulers and commands, one after the other, and how their calls ended."""

    def __init__(self, hostile: Hostile, seed: int) -> None:
        self.ended: Counter[str] = Counter()
        self._hostile = hostile
        self._rng = random.Random(f"{seed}/lives")  # noqa: S311 - a seed that repeats, no secret
        self._cache: Cache = plain(seed=1)

    async def one(self) -> None:
        """Live one life of each."""
        self._hostile.civil = self._rng.choice([0.0, 0.5, 0.9, 0.98])
        await self._within("worker", self._worker())
        await self._within("scheduler", self._scheduler())
        await self._within("asker", asyncio.to_thread(self._ask))
        while parked:  # it said that it may still use a worker's memory, and nobody believes it here
            parked.pop().close()

    async def _within(self, what: str, life: Awaitable[None]) -> None:
        task = asyncio.ensure_future(life)
        await asyncio.wait({task}, timeout=HANGS_SECONDS)
        if not task.done():
            raise AssertionError(f"a {what} hangs: {task}")
        try:
            task.result()
        except LMLiveError as error:
            self.ended[f"{what} {type(error).__name__}"] += 1

    async def _worker(self) -> None:
        blocks = list(range(8))
        async with self._cache.worker(self._hostile.url, config=CONFIG) as worker:
            calls: list[Callable[[], Awaitable[Any]]] = [
                lambda: worker.store(TOKENS, blocks),
                lambda: worker.retrieve(TOKENS, blocks),
                lambda: worker.retrieve(TOKENS, blocks, lease="lease", skip_tokens=CHUNK),
                worker.ping,
            ]
            for _ in range(4):
                await asyncio.gather(*[self._call(call) for call in calls])
        parts = worker._parts
        assert parts is not None
        assert parts.exchange.link.pending == 0
        assert not parts.exchange.link._late
        assert parts.heart._link.pending == 0

    async def _scheduler(self) -> None:
        async with lmlive.Scheduler(self._hostile.url, model="m", config=CONFIG) as scheduler:
            for _ in range(4):
                await self._call(lambda: scheduler.lookup(TOKENS))
                await self._call(lambda: scheduler.release("lease"))
        assert scheduler._link is not None
        assert scheduler._link.pending == 0
        assert not scheduler._background

    async def _call(self, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            result = await call()
        except LMLiveError as error:
            self.ended[type(error).__name__] += 1
        else:
            reason = getattr(result, "reason", result)
            known = reason if not isinstance(reason, str) or len(reason) < 20 else "long"
            self.ended[f"{type(result).__name__} {known}"] += 1

    def _ask(self) -> None:
        with Asker(self._hostile.url, MonotonicClock()) as asker:
            for verb, payload in ((Verb.PING, [None]), (Verb.STATUS, []), (Verb.CLEAR, [None]), (Verb.REAP, [1, None])):
                try:
                    asker.hello(0.1)
                    parse_reply(verb, asker.ask(verb, list(payload), 0.1).payload)
                except LMLiveError as error:
                    self.ended[f"asker {type(error).__name__}"] += 1
                else:
                    self.ended["asker ok"] += 1


async def fuzz_workers(directory: Path, seed: int, replies: int) -> dict[str, Any]:
    """Have at least so many requests answered badly; give how the calls ended, or what went wrong."""
    directory.mkdir(exist_ok=True)  # noqa: ASYNC240 - nothing else waits here
    began = time.monotonic()
    lived = 0
    with Ear() as ear, Hostile(directory, seed) as hostile:
        lives = Lives(hostile, seed)
        while hostile.replies < replies:
            lived += 1
            try:
                await lives.one()
            except Exception:  # noqa: BLE001 - that is the finding
                return {"finding": traceback.format_exc()[-4000:], "seed": seed, "life": lived}
            if ear.heard:
                return {"finding": ear.heard[0][-4000:], "seed": seed, "life": lived}
        seconds = time.monotonic() - began
        return {
            "lives": lived,
            "replies": hostile.replies,
            "seconds": round(seconds, 1),
            "ended": dict(lives.ended.most_common()),
        }
