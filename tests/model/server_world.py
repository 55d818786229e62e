"""A real server on simulated ground, the workers around it, and whatever may befall them.

The workers have no manners: they speak the raw wire, and a model says what and when. What the kernel would tell of
their processes comes in where it always does: at the tethers' peers.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

from lmlive.config import ServerConfig
from lmlive.errors import HandleCloseError, HandleOpenError
from lmlive.liveness.policy import ReapPolicy
from lmlive.modules.books import Books
from lmlive.modules.handler import Lane
from lmlive.modules.management import hash_secret
from lmlive.protocol.codec import decode_header, encode_request
from lmlive.protocol.tether import Offer
from lmlive.protocol.verbs import Role, Verb
from lmlive.server.evidence import Sender
from lmlive.server.peers import Peer, Peers
from lmlive.server.server import LivenessServer
from lmlive.testing.clock import ManualClock
from lmlive.testing.dealer import MemoryDealer
from lmlive.testing.device import RecordingBackend, Step
from lmlive.testing.gate import Gate
from lmlive.testing.network import MemoryNetwork
from tests.model.server_ground import Faulty, GroundLoop, InlineLanes, Mirror, Owner, Trace, TracedEvents, TracedRouter
from tests.model.server_model import Oracle, Said
from tests.server.raw import bare, memory_file, register

POLICIES = (
    ReapPolicy(timeout=120.0, grace=600.0, hold=240.0),
    ReapPolicy(timeout=120.0, grace=120.0, hold=0.0),
    ReapPolicy(timeout=0.0, grace=600.0, hold=240.0),
)
DRAIN_SECONDS = 5.0
FIRST_PID = 2**23
"""Over any pid that a kernel gives: nobody's."""
TETHERED_ROUTE = 4 * 4096

STEP_OF: Mapping[Lane, tuple[Step, ...]] = {
    Lane.REGISTER: ("open",),
    Lane.TRANSFER: ("gather", "scatter"),
    Lane.RELEASE: ("close",),
}


@dataclass(eq=False)
class Worker:
    """One process that has, or had, to do with the server."""

    name: str
    instance: int
    pid: int
    secret: bytes
    exit_fd: int
    memories: dict[int, int] = field(default_factory=dict)
    registers: set[int] = field(default_factory=set)
    keys: list[bytes] = field(default_factory=list)
    dealer: MemoryDealer | None = None
    connection: int = 0
    peer: Peer | None = None
    epoch: int = 0
    generation: int = 0
    beats: bool = False
    stopped: bool = False
    killed: bool = False


class World:
    """One server at a time, three workers, and the weather.

    Args:
        policy: The windows.
        patches: What a broken build replaces: where to find it -> what to put there.
    """

    def __init__(self, policy: ReapPolicy, patches: Mapping[str, object]) -> None:
        self.policy = policy
        self.stack = ExitStack()
        self.clock = ManualClock(1000.0)
        self.loop = GroundLoop(self.clock)
        self.stack.callback(self.loop.close)
        log = logging.getLogger("lmlive.server")
        self.stack.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        self.numbers = count(1)
        self.pids = count(FIRST_PID)
        self.said: dict[str, Said] = {}
        self.gates: dict[Step, Gate] = {}
        self.workers: list[Worker] = []
        self.fds: list[int] = []
        self.stack.callback(self.close_descriptors)
        self.lanes: list[InlineLanes] = []
        self.watched = 0.0
        self.sound = True
        """False once a step has failed: then there is nothing left to be judged."""
        self.patches = {**patches, "lmlive.server.assembly.Lanes": self.make_lanes}
        for place, thing in self.patches.items():
            self.stack.enter_context(mock.patch(place, thing))
        self.network = MemoryNetwork()
        for name, instance in (("a", 1), ("b", 1), ("c", 2)):
            self.workers.append(self.new_worker(name, instance))
        self.run(self.start())

    def run(self, step: Coroutine[Any, Any, None]) -> None:
        """Do one step, come to rest, and let the oracle judge what was seen."""
        self.sound = False
        self.loop.run_until_complete(self.do(step))
        self.judge()
        self.sound = True

    async def do(self, step: Coroutine[Any, Any, None]) -> None:
        await step
        await self.loop.come_to_rest()

    def judge(self) -> None:
        for seen in self.trace:
            self.oracle.judge(seen)
            if seen.kind == "reply":
                self.learn(*seen.facts)
        self.trace.clear()

    # The server

    async def start(self) -> None:
        self.trace = Trace(self.clock)
        self.backend = RecordingBackend()
        self.owner = Owner(self.trace, self.is_detached)
        targets = (self.owner, Faulty(), Mirror(self.trace, self.is_detached))
        config = ServerConfig(
            run_dir=Path("/tmp/lmlive-model"),
            pool_bytes="1MiB",
            chunk_tokens=16,
            drain_seconds=DRAIN_SECONDS,
            worker_reap_timeout_seconds=self.policy.timeout,
            worker_registration_grace_seconds=self.policy.grace,
            worker_alive_hold_seconds=self.policy.hold,
            environ={},
        )
        self.server = LivenessServer(
            config, clock=self.clock, router=self.make_router, backend=self.backend, targets=targets
        )
        self.oracle = Oracle(self.policy, self.server.epoch, self.said)
        made = TracedEvents(self.trace)
        with mock.patch("lmlive.server.assembly.Books", partial(Books, events=made)):
            await self.server.start()
        assert self.server._parts is not None
        self.parts = self.server._parts
        self.books = self.parts.books

    def make_router(self, urls: Any, **settings: Any) -> TracedRouter:
        self.router = TracedRouter(self.trace, self.network, urls, **settings)
        return self.router

    def make_lanes(self, loop: asyncio.AbstractEventLoop, **threads: int) -> InlineLanes:
        self.lanes.append(InlineLanes(loop, hangs=self.hangs, **threads))
        return self.lanes[-1]

    def hangs(self, lane: Lane) -> bool:
        return any(step in self.gates for step in STEP_OF.get(lane, ()))

    def is_detached(self, instance: int) -> bool:
        return self.books.entries.find(instance) is None

    async def close(self) -> None:
        self.trace.note("close")
        self.server.close()
        await self.server.wait_closed()

    def end_server(self) -> None:
        """Close it; whatever hangs goes on after its end."""
        self.run(self.close())
        self.watched += self.books.watch.latest.watched
        assert not self.oracle.living, "the end of the server is the end of every entry"
        for life in self.oracle.lives:
            life.borrows = 0  # what ran on gets no answer any more
        for step in list(self.gates):
            self.let_go(step)
        self.lanes[-1].join()
        self.run(asyncio.sleep(0))
        self.free_pool()
        self.oracle.check_memory(self.backend.opened, self.backend.closed)
        assert len(self.books.leases) == 0 or self.oracle.leases
        for worker in self.workers:
            worker.dealer, worker.peer = None, None

    def free_pool(self) -> None:
        """Do what the end of a process would: a server leaves its pool while a copy still runs."""
        if self.server._copying and self.server._pool is not None:
            self.server._pool.close()

    # Workers

    def new_worker(self, name: str, instance: int) -> Worker:
        number = next(self.numbers)
        exit_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.fds.append(exit_fd)
        return Worker(name, instance, next(self.pids), number.to_bytes(16, "big"), exit_fd)

    def memory_of(self, worker: Worker, memory: int) -> int:
        if memory not in worker.memories:
            worker.memories[memory] = memory_file(f"lmlive-model-{memory}", TETHERED_ROUTE)
            self.fds.append(worker.memories[memory])
        return worker.memories[memory]

    def close_descriptors(self) -> None:
        for fd in self.fds:
            os.close(fd)

    def connect(self, worker: Worker) -> None:
        if worker.dealer is None and not worker.killed:
            worker.dealer = self.network.dealer()
            worker.connection = next(self.numbers)
            self.router.connections_of[worker.dealer.peer] = worker.connection

    def send(self, worker: Worker, verb: Verb, payload: list[object], **header: int) -> None:
        if worker.dealer is None or worker.killed:
            return
        number = next(self.numbers)
        if verb is Verb.REGISTER:
            worker.registers.add(number)
        fields = {"instance_id": worker.instance, "epoch": worker.epoch, "generation": worker.generation} | header
        worker.dealer.send(encode_request(verb, number, payload, **fields))

    def learn(self, peer: bytes, frame: bytes) -> None:
        """Let a worker read a reply."""
        header = decode_header(frame)
        for worker in self.workers:
            if worker.dealer is not None and worker.dealer.peer == peer and not header.code:
                worker.epoch = header.epoch
                if header.request_id in worker.registers:
                    worker.generation = header.generation

    def hello(self, worker: Worker) -> None:
        self.send(worker, Verb.HELLO, [1, 1, int(Role.WORKER), "model", worker.secret])

    def ping(self, worker: Worker, **header: int) -> None:
        self.send(worker, Verb.PING, [worker.instance], **header)

    def register(self, worker: Worker, memory: int | None) -> None:
        model = f"{worker.secret.hex()}.{memory}"
        self.said[model] = Said(worker.secret, memory)
        body = bare(worker.secret, model) if memory is None else register(4, worker.secret, model)
        self.send(worker, Verb.REGISTER, body)

    def store(self, worker: Worker, *, fresh: bool) -> None:
        if fresh or not worker.keys:
            worker.keys.append(next(self.numbers).to_bytes(32, "big"))
        self.send(worker, Verb.STORE, [worker.keys[-1], [(0).to_bytes(4, "little")], 0, bytes(16)])

    def look_up(self, worker: Worker, of: Worker, memory: int) -> None:
        """Let one look up what another stored, and lease it."""
        if of.keys:
            model = f"{of.secret.hex()}.{memory}"
            self.send(worker, Verb.LOOKUP, [model, "", 1, of.keys[-1], None], instance_id=0, generation=0)

    # Tethers and processes

    @property
    def peers(self) -> Peers:
        return self.parts.tethers.peers

    def tie(self, worker: Worker, memory: int | None) -> None:
        """Let a worker's tether stand, and bring the descriptor of its memory."""
        if worker.killed:
            return
        if worker.peer is None or worker.peer.sock is None or worker.peer.record is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.close()
            worker.peer = self.peers.add(ours, None)
        fds = [] if memory is None else [os.dup(self.memory_of(worker, memory))]
        sender = Sender(pid=worker.pid, uid=os.geteuid(), pidfd=os.dup(worker.exit_fd), fds=fds)
        self.trace.note("tether", worker.secret, worker.instance, True, worker.pid)
        try:
            self.peers.take_offer(worker.peer, Offer(worker.secret, worker.instance, Role.WORKER, 0, len(fds)), sender)
        finally:
            sender.close()

    def lose(self, worker: Worker) -> None:
        """Let a tether's socket end."""
        peer = worker.peer
        if peer is not None and peer.sock is not None and peer.record is not None:
            self.trace.note("lost", worker.secret)
            self.peers.lose(peer)

    def kill(self, worker: Worker) -> None:
        """End a worker's process; the kernel tells whoever watches it."""
        worker.killed = True
        os.eventfd_write(worker.exit_fd, 1)
        peer = self.peers._by_secret.get(hash_secret(worker.secret))
        live = self.oracle.live_of(worker.secret)
        if peer is None or peer.process is None:
            assert live is None or not live.was_tied, "a process that registered is not watched any more"
            return
        callback, arguments = self.loop.readers[peer.process.pidfd]
        self.trace.note("exit", worker.secret)
        callback(*arguments)

    def cut(self, worker: Worker) -> None:
        """End a worker's connection; the monitor tells the server."""
        if worker.dealer is not None:
            worker.dealer.vanish()
            worker.dealer = None
            self.trace.note("channel", worker.secret)
            self.router.settings["on_lost"](worker.connection)

    # Time and hindrances

    async def pass_time(self, seconds: float, beat: float) -> None:
        """Let time pass; whoever keeps the beat pings."""
        end = self.clock.now() + seconds
        beating = [worker for worker in self.workers if worker.beats and not worker.stopped]
        while (left := end - self.clock.now()) > 0:
            await asyncio.sleep(min(left, beat) if beating else left)
            for worker in beating:
                self.ping(worker)

    def stall(self, seconds: float) -> None:
        """Stop the server's loop for so long."""
        self.trace.note("stall")
        self.clock.advance(seconds)

    def sleep(self, seconds: float) -> None:
        """Let the machine sleep."""
        self.trace.note("sleep")
        self.clock.suspend(seconds)

    def hang(self, step: Step) -> None:
        if step not in self.gates:
            self.gates[step] = self.backend.gate(step)
            self.oracle.hangs_allowed |= step == "close"

    def let_go(self, step: Step) -> None:
        gate = self.gates.pop(step, None)
        if gate is not None:
            gate.open()

    def fail(self, step: Step) -> None:
        if step == "close":
            self.oracle.hangs_allowed = True
            self.backend.fail(step, HandleCloseError("it cannot be closed"))
        else:
            self.oracle.open_fails = True
            self.backend.fail(step, HandleOpenError("it cannot be opened"))

    # At rest

    def check(self) -> None:
        self.sound = False
        self.oracle.now = self.clock.now()
        self.oracle.check_status(self.server.status())
        self.oracle.check_memory(self.backend.opened, self.backend.closed)
        assert self.parts.dispatcher.broken_rules == 0
        assert self.router.handler_errors == 0
        for secret in self.oracle.ended_secrets:
            assert not self.books.leases.holds(hash_secret(secret)), "the dead hold no leases"
        self.sound = True

    async def quiesce(self) -> None:
        self.router.resume()
        for step in list(self.gates):
            self.let_go(step)
        await asyncio.sleep(3.0)

    def finish(self) -> None:
        """Come to rest, end the server, and leave nothing behind."""
        self.run(self.quiesce())
        self.check()
        self.oracle.check_quiet(self.backend.opened, self.backend.closed)
        self.end_server()

    def tear_down(self) -> None:
        """Leave nothing behind, also where a step failed half-way."""
        for gate in self.gates.values():
            gate.open()
        try:
            self.loop.run_until_complete(self.give_up())
        finally:
            for lanes in self.lanes:
                lanes.join()
            self.free_pool()
            self.stack.close()

    async def give_up(self) -> None:
        self.router.resume()
        await self.loop.come_to_rest()
        self.server.terminate()
        try:
            async with asyncio.timeout(60.0):
                await self.server.wait_closed()
        except TimeoutError:  # a broken build may wait for ever
            assert self.server._closing is not None
            self.server._closing.cancel()
            await self.server.wait_closed()
        await self.loop.come_to_rest()
