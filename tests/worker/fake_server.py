"""A server that does what a test says: a ROUTER and a tether in a thread, speaking bytes.

By itself it answers like a server that knows one instance. A test changes what it knows (``epoch``, ``generation``),
what it says to a verb (``answers``), or whether it says anything (``hold``, ``ignore``).
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import zmq

from lmlive.errors import InvalidHandle, LMLiveError
from lmlive.protocol.codec import Header, decode_body, decode_header, encode_error, encode_reply
from lmlive.protocol.tether import (
    MAX_PACKET_BYTES,
    Greeting,
    Offer,
    PoolGrant,
    Receipt,
    decode_word,
    encode_refusal,
)
from lmlive.protocol.verbs import Verb

LIMITS = {"message_bytes": 1 << 20, "tokens": 1 << 20, "blocks": 65_536, "in_flight": 64}


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    peer: bytes
    header: Header
    payload: list[object]
    bulk: tuple[bytes, ...] = ()

    @property
    def verb(self) -> Verb:
        return Verb(self.header.code)


Answer = Callable[[Request], list[object] | LMLiveError | None]


class FakeServer:
    """Speaks for one instance."""

    def __init__(self, directory: Path, *, tether: bool = True) -> None:
        self.path = directory / "router.sock"
        self.url = f"ipc://{self.path}"
        self.epoch = 7
        self.tether_epoch: int | None = None
        self.generation = 0
        self.next_generation = 1
        self.clock_offset_ns = 0
        self.reap_timeout = 120.0
        self.chunk_tokens = 64
        self.limits = dict(LIMITS)
        self.answers: dict[Verb, Answer] = {}
        self.requests: list[Request] = []
        self.offers: list[tuple[Offer, int]] = []
        self.greeted = 0
        """How many tethers were taken."""
        self._held: set[Verb] = set()
        self._ignored: set[Verb] = set()
        self._kept: list[Request] = []
        self._with_tether = tether
        self.refusal: LMLiveError | None = None
        """What offers are answered with, if not with a receipt."""
        self.keeps_refused = False
        """Whether a tether stays open whose offer was refused."""
        self.refuses_memory_only = False
        """Whether an offer without descriptors gets a receipt all the same."""
        self.greeting: LMLiveError | None = None
        """What tethers are greeted with, if not with the epoch; they are closed then."""
        self.paused = False
        """Whether the ROUTER is left alone."""
        self.answers_probes = True
        """Whether PINGs over data connections are answered also while PINGs are held or ignored."""
        self.stop_reading = False
        """Whether offers get no receipt."""
        self.pool: int | None = None
        """What workers get that ask for the pool; without it they are refused."""
        self.pool_requests = 0
        self.bulk: tuple[bytes, ...] = ()
        """What an answer brings behind it."""
        self._members: set[bytes] = set()
        self._cut = False
        self._stop = threading.Event()
        self._bound = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to serve; again after ``stop``."""
        self._stop.clear()
        self._bound.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._bound.wait()

    def stop(self) -> None:
        """Close all sockets, as a server that ends does."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    def replace(self) -> None:
        """Be another server from now on, which knows nobody."""
        self.epoch += 1
        self.generation = 0

    def seen(self, verb: Verb) -> list[Request]:
        """Give the requests of one verb so far."""
        return [request for request in list(self.requests) if request.header.code == verb]

    def cut_tethers(self) -> None:
        """Close the tethers, and go on listening."""
        self._cut = True

    @contextmanager
    def hold(self, *verbs: Verb) -> Iterator[None]:
        """Keep the requests of these verbs; answer them afterwards."""
        self._held |= set(verbs)
        yield
        self._held -= set(verbs)

    @contextmanager
    def ignore(self, *verbs: Verb) -> Iterator[None]:
        """Never answer what comes meanwhile."""
        self._ignored |= set(verbs)
        yield
        self._ignored -= set(verbs)

    def answer(self, request: Request) -> list[object]:
        """Answer like a server that all is well with."""
        match request.verb:
            case Verb.HELLO:
                now = time.monotonic_ns() + self.clock_offset_ns
                return [1, self.chunk_tokens, 10.0, self.reap_timeout, self.limits, None, now]
            case Verb.REGISTER:
                if not self.generation:
                    self.generation = self.next_generation
                    self.next_generation += 1
                return [10.0, b""]
            case Verb.STORE:
                keys = request.payload[0]
                assert isinstance(keys, bytes)
                return [len(keys) // 32 * self.chunk_tokens, len(keys) // 32, "stored"]
            case Verb.RETRIEVE:
                keys = request.payload[0]
                assert isinstance(keys, bytes)
                return [len(keys) // 32 * self.chunk_tokens, "loaded"]
            case Verb.LOOKUP:
                return [self.chunk_tokens, "a-lease", 60.0, "hit"]
            case _:
                return [True]

    # the thread

    def _run(self) -> None:
        self._cut = False
        context = zmq.Context()
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(self.url)
        tethers: dict[int, socket.socket] = {}
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        if self._with_tether:
            listener.bind(f"{self.path}.tether")
            listener.listen()
            poller.register(listener.fileno(), zmq.POLLIN)
        self._bound.set()
        while not self._stop.is_set():
            ready = dict(poller.poll(5))
            if router in ready and not self.paused:
                self._receive(router)
            if listener.fileno() in ready:
                peer, _ = listener.accept()
                if self._greet(peer):
                    tethers[peer.fileno()] = peer
                    poller.register(peer.fileno(), zmq.POLLIN)
                else:
                    peer.close()
            for fd in [fd for fd in tethers if fd in ready or self._cut]:
                if self._cut or not self._read_offer(tethers[fd]):
                    poller.unregister(fd)
                    tethers.pop(fd).close()
            self._cut = False
            for request in [kept for kept in self._kept if kept.verb not in self._held]:
                self._kept.remove(request)
                self._reply(router, request)
        for peer in tethers.values():
            peer.close()
        listener.close()
        Path(f"{self.path}.tether").unlink(missing_ok=True)
        router.close(0)
        context.term()

    def _receive(self, router: zmq.Socket[bytes]) -> None:
        while router.poll(0):
            peer, frame, *bulk = router.recv_multipart()
            request = Request(peer, decode_header(frame), decode_body(frame), tuple(bulk))
            self.requests.append(request)
            if request.verb is Verb.REGISTER:
                self._members.add(peer)
            # Holding PINGs holds the beat's; those of a data connection ask whether the server says anything.
            probes = request.verb is Verb.PING and request.payload != [None] and peer not in self._members
            if request.verb in self._ignored and not (probes and self.answers_probes):
                continue
            if request.verb in self._held and not (probes and self.answers_probes):
                self._kept.append(request)
            else:
                self._reply(router, request)

    def _greet(self, peer: socket.socket) -> bool:
        self.greeted += 1
        epoch = self.epoch if self.tether_epoch is None else self.tether_epoch
        greeting = Greeting(epoch).encode() if self.greeting is None else encode_refusal(self.greeting)
        try:
            peer.send(greeting)
        except ConnectionError:
            return False
        return self.greeting is None

    def _read_offer(self, peer: socket.socket) -> bool:
        try:
            packet, fds, _, _ = socket.recv_fds(peer, MAX_PACKET_BYTES, 64)
        except ConnectionError:
            return False
        for fd in fds:
            os.close(fd)
        if not packet:
            return False
        if self.refusal is not None and (fds or not self.refuses_memory_only):
            with suppress(ConnectionError):
                peer.send(encode_refusal(self.refusal))
            return self.keeps_refused
        offer = decode_word(packet)
        if not isinstance(offer, Offer):
            self._give_pool(peer)
            return True
        self.offers.append((offer, len(fds)))
        if not self.stop_reading:
            with contextlib.suppress(BrokenPipeError):  # its peer may be gone by now
                peer.send(Receipt(offer.first + len(fds)).encode())
        return True

    def _give_pool(self, peer: socket.socket) -> None:
        self.pool_requests += 1
        with suppress(ConnectionError):
            if self.pool is None:
                peer.send(encode_refusal(InvalidHandle("this pool is not shared")))
            else:
                nbytes = os.fstat(self.pool).st_size
                socket.send_fds(peer, [PoolGrant(nbytes).encode()], [self.pool, self.pool])

    def _reply(self, router: zmq.Socket[bytes], request: Request) -> None:
        header = request.header
        self.bulk = ()
        answer = self.answers.get(request.verb, self.answer)(request)
        if answer is None:
            return
        if isinstance(answer, LMLiveError):
            frame = encode_error(header.request_id, self.epoch, header.instance_id, self.generation, answer)
        else:
            frame = encode_reply(header.request_id, self.epoch, header.instance_id, self.generation, answer)
        router.send_multipart([request.peer, frame, *self.bulk])
