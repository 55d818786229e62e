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
from itertools import count
from typing import Any
from unittest import mock

from lmlive.liveness.policy import ReapPolicy
from lmlive.modules.management import hash_secret
from lmlive.protocol.codec import decode_header
from lmlive.protocol.tether import Offer
from lmlive.server.evidence import Sender
from lmlive.server.peers import Peers
from lmlive.testing.clock import ManualClock
from lmlive.testing.network import MemoryNetwork
from tests.model.server_ground import GroundLoop
from tests.model.server_lives import Said
from tests.model.server_reign import Reign
from tests.model.server_workers import Worker

POLICIES = (
    ReapPolicy(timeout=120.0, grace=600.0, hold=240.0),
    ReapPolicy(timeout=120.0, grace=120.0, hold=0.0),
    ReapPolicy(timeout=0.0, grace=600.0, hold=240.0),
)
FIRST_PID = 2**23
"""Over any pid that a kernel gives: nobody's."""


class World:
    """One server at a time, three workers, a scheduler, and the weather.

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
        self.workers: list[Worker] = []
        self.everyone: list[Worker] = []
        """With those that others have replaced."""
        self.watched = 0.0
        self.sound = True
        """False once a step has failed: then there is nothing left to be judged."""
        for place, thing in patches.items():
            self.stack.enter_context(mock.patch(place, thing))
        self.network = MemoryNetwork()
        for name, instance in (("a", 1), ("b", 1), ("c", 2), ("scheduler", 0)):
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
        for seen in self.reign.trace:
            self.reign.oracle.judge(seen)
            if seen.kind == "reply":
                self.learn(*seen.facts)
        self.reign.trace.clear()

    # The server

    async def start(self) -> None:
        self.reign = Reign(self.policy, self.clock, self.network, self.said)
        await self.reign.start()

    def end_server(self) -> None:
        """Close it, if nobody did; whatever hangs goes on after its end."""
        reign = self.reign
        self.run(reign.close())
        self.watched += reign.books.watch.latest.watched
        reign.forget_copies()
        reign.let_all_go()
        reign.lanes.join()
        self.run(asyncio.sleep(0))
        reign.free_pool()
        reign.check_end()
        for worker in self.workers:
            worker.dealer, worker.peer, worker.lease = None, None, None
            worker.old_epoch = reign.server.epoch

    def succeed(self) -> None:
        """End the server and start its successor."""
        self.end_server()
        self.run(self.start())

    # Workers

    def new_worker(self, name: str, instance: int) -> Worker:
        secret = next(self.numbers).to_bytes(16, "big")
        exit_fd = os.eventfd(0, os.EFD_CLOEXEC)
        worker = Worker(name, instance, next(self.pids), secret, exit_fd, self.numbers, self.said)
        self.stack.callback(worker.close_descriptors)
        self.everyone.append(worker)
        return worker

    def connect(self, worker: Worker) -> None:
        if worker.dealer is None and not worker.killed and not self.reign.closed:
            worker.dealer = self.network.dealer()
            worker.connection = next(self.numbers)
            self.reign.router.connections_of[worker.dealer.peer] = worker.connection

    def learn(self, peer: bytes, frame: bytes) -> None:
        """Let a worker read a reply."""
        header = decode_header(frame)
        for worker in self.workers:
            if worker.dealer is not None and worker.dealer.peer == peer and not header.code:
                worker.learn(header, frame)

    # Tethers and processes

    @property
    def peers(self) -> Peers:
        return self.reign.parts.tethers.peers

    def tie(self, worker: Worker, memory: int | None) -> None:
        """Let a worker's tether stand, and bring the descriptor of its memory."""
        if worker.killed or not self.reign.listens:
            return
        if worker.peer is None or worker.peer.sock is None or worker.peer.record is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.close()
            worker.peer = self.peers.add(ours, None)
        fds = [] if memory is None else [os.dup(worker.memory(memory))]
        sender = Sender(pid=worker.pid, uid=os.geteuid(), pidfd=os.dup(worker.exit_fd), fds=fds)
        self.reign.trace.note("tether", worker.secret, worker.instance, True, worker.pid)
        try:
            self.peers.take_offer(worker.peer, Offer(worker.secret, worker.instance, worker.role, 0, len(fds)), sender)
        finally:
            sender.close()

    def lose(self, worker: Worker) -> None:
        """Let a tether's socket end."""
        peer = worker.peer
        if peer is not None and peer.sock is not None and peer.record is not None:
            self.reign.trace.note("lost", worker.secret)
            self.peers.lose(peer)

    def kill(self, worker: Worker) -> None:
        """End a worker's process; the kernel tells whoever watches it."""
        worker.killed = True
        os.eventfd_write(worker.exit_fd, 1)
        peer = self.peers._by_secret.get(hash_secret(worker.secret))
        live = self.reign.oracle.history.live_of(worker.secret)
        if peer is None or peer.process is None:
            assert live is None or not live.was_tied, "a process that registered is not watched any more"
            return
        callback, arguments = self.loop.readers[peer.process.pidfd]
        self.reign.trace.note("exit", worker.secret)
        callback(*arguments)

    def cut(self, worker: Worker) -> None:
        """End a worker's connection; the monitor tells the server."""
        if worker.dealer is not None:
            worker.dealer.vanish()
            worker.dealer = None
            self.reign.trace.note("channel", worker.secret)
            self.reign.router.settings["on_lost"](worker.connection)

    # Time

    async def pass_time(self, seconds: float, beat: float) -> None:
        """Let time pass; whoever keeps the beat pings."""
        end = self.clock.now() + seconds
        beating = [worker for worker in self.workers if worker.beats and not worker.stopped]
        while (left := end - self.clock.now()) > 0:
            await asyncio.sleep(min(left, beat) if beating else left)
            for worker in beating:
                worker.ping()

    def until_a_scan(self) -> float:
        return max(self.reign.oracle.hours.last_scan[0] + self.policy.scan_interval - self.clock.now(), 0.0)

    def stall(self, seconds: float) -> None:
        """Stop the server's loop for so long."""
        self.reign.trace.note("stall")
        self.clock.advance(seconds)

    def sleep(self, seconds: float) -> None:
        """Let the machine sleep."""
        self.reign.trace.note("sleep")
        self.clock.suspend(seconds)

    # At rest

    def check(self) -> None:
        self.sound = False
        if self.reign.closed:
            self.succeed()
            self.sound = False
        self.reign.check(self.everyone)
        for worker in self.workers:
            if worker.killed and worker.secret in self.reign.oracle.history.ended_secrets:
                assert worker.peer is None or worker.peer.process is None, "the dead are not watched any more"
        self.sound = True

    async def quiesce(self) -> None:
        self.reign.router.resume()
        self.reign.let_all_go()
        await asyncio.sleep(3.0)

    def finish(self) -> None:
        """Come to rest, end the server, and leave nothing behind."""
        self.run(self.quiesce())
        self.check()
        self.reign.oracle.check_quiet(self.reign.backend.opened, self.reign.backend.closed)
        self.end_server()

    def tear_down(self) -> None:
        """Leave nothing behind, also where a step failed half-way."""
        self.reign.let_all_go()
        try:
            self.loop.run_until_complete(self.give_up())
        finally:
            self.reign.lanes.join()
            self.reign.free_pool()
            self.stack.close()

    async def give_up(self) -> None:
        self.reign.router.resume()
        await self.loop.come_to_rest()
        await self.reign.give_up()
        await self.loop.come_to_rest()
