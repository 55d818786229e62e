"""A state machine that drives a whole server through everything that may befall it and its workers.

Beside single steps it has stories: what takes several steps in one order, and would hardly be drawn by chance.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from lmlive.protocol.verbs import Verb
from tests.model.server_steps import SCHEDULER, Steps, often, pauses, rarely, whom

WAYS_TO_LEAVE = ("unregister", "kill", "supersede", "reap")


class ServerMachine(Steps):
    def be_at_work(self, number: int) -> None:
        """Let a worker be there and ping, whatever became of it before."""
        self.let_go("open")
        self.replace_if_gone(number)
        self.do_serve(number, 0, tied=True, beats=True)

    # Of registering

    @rule(beats=st.booleans())
    def rival_comes(self, beats: bool) -> None:
        """Let a stranger try to take, to use and to end the first worker's instance."""
        self.be_at_work(0)
        world, rival = self.world, self.worker(1)
        self.do_serve(1, None, tied=True, beats=beats)
        self.step(lambda: rival.send(Verb.UNREGISTER, [rival.secret]))
        rival.beats = False
        if world.reign.oracle.history.tethers.get(rival.secret, (0, 0, 0, False))[3]:
            self.kill(1, of=0, closes_first=beats, late=False, memory=None)
            world.workers[1] = world.new_worker(rival.name, rival.instance)

    @rule(number=whom, memory=st.sampled_from([0, 1]))
    def the_old_one_speaks(self, number: int, memory: int) -> None:
        """Let a worker speak under the generation that it had before it registered other memory."""
        before = self.worker(number).generation
        self.register(number, memory, brings=True)
        self.register(number, 1 - memory, brings=True)
        worker = self.worker(number)
        self.time_passes(10.0, 10.0)
        self.step(lambda: worker.ping(generation=before))
        self.step(lambda: worker.send(Verb.REAP, [worker.instance, before]))

    @rule(number=whom)
    def speaks_to_the_server_before(self, number: int) -> None:
        """Let a worker use the epoch of another server, whose generations count from 1 as well."""
        self.be_at_work(number)
        worker = self.worker(number)
        self.time_passes(10.0, 60.0)

        def act() -> None:
            worker.ping(epoch=worker.old_epoch)
            worker.store(fresh=True, epoch=worker.old_epoch)
            worker.look_up(worker, 0, epoch=worker.old_epoch)

        self.step(act)

    @rule(number=whom, memory=st.sampled_from([0, 1]), late=st.booleans())
    def kill_while_it_registers(self, number: int, memory: int, late: bool) -> None:
        self.hang("open")
        self.do_serve(number, memory, tied=True, beats=False)
        self.kill(number, of=0, closes_first=late, late=False, memory=None)
        self.let_go("open")

    # Of leases and copies

    def offer_a_chunk(self) -> None:
        """Let the first worker have stored something."""
        self.let_go("gather")
        self.be_at_work(0)
        self.store(0, fresh=True)

    @rule(of=whom, renews=rarely)
    def scheduler_looks_up(self, of: int, renews: bool) -> None:
        """Let the scheduler lease what a worker has just stored."""
        self.replace_if_gone(SCHEDULER)
        scheduler = self.worker(SCHEDULER)
        self.heal(SCHEDULER, tether_too=True)
        self.step(lambda: self.worker(of).store(fresh=True))
        lease = scheduler.lease if renews else None
        self.step(lambda: scheduler.look_up(self.worker(of), 0, lease=lease))

    @rule(number=whom, leased=often, looks_up=often)
    def retrieve(self, number: int, leased: bool, looks_up: bool) -> None:
        if looks_up:
            self.scheduler_looks_up(number, renews=False)
        lease = self.worker(SCHEDULER).lease if leased else None
        self.step(lambda: self.worker(number).retrieve(lease))

    @rule(number=st.sampled_from([0, SCHEDULER, SCHEDULER]), looks_up=often)
    def release(self, number: int, looks_up: bool) -> None:
        if looks_up:
            self.scheduler_looks_up(0, renews=False)
        lease = self.worker(SCHEDULER).lease
        if lease is not None:
            self.step(lambda: self.worker(number).send(Verb.RELEASE, [lease]))

    @rule(by_exit=often, late=st.booleans())
    def scheduler_leaves(self, by_exit: bool, late: bool) -> None:
        """End the scheduler while it holds leases; its last LOOKUP may be read only afterwards."""
        self.offer_a_chunk()
        self.scheduler_looks_up(0, renews=False)
        if by_exit:
            self.kill(SCHEDULER, of=0, closes_first=True, late=late, memory=None)
            return
        self.unregister(SCHEDULER, names_itself=False)
        if late:
            self.look_up(SCHEDULER, of=0, memory=0)

    @rule(by_exit=st.booleans(), late=st.booleans())
    def leaves_with_leases(self, by_exit: bool, late: bool) -> None:
        """Let a worker end while it holds leases."""
        self.offer_a_chunk()
        self.serve(2, None, tied=True, beats=False)
        self.look_up(2, of=0, memory=0)
        if by_exit:
            self.kill(2, of=0, closes_first=True, late=late, memory=None)
        else:
            self.unregister(2, names_itself=late)
            self.look_up(2, of=0, memory=0)

    @rule(number=whom, loads=rarely, then=st.sampled_from([None, None, "silence", *WAYS_TO_LEAVE]))
    def borrow(self, number: int, loads: bool, then: str | None) -> None:
        """Begin a transfer that does not end by itself; while it runs, its worker may be silent, or leave."""
        if then is not None:
            self.be_at_work(number)
        world, worker = self.world, self.worker(number)
        if loads:
            self.step(lambda: worker.store(fresh=True))

        def act() -> None:
            world.reign.hang("scatter" if loads else "gather")
            if loads:
                worker.retrieve(None)
            else:
                worker.store(fresh=True)

        self.step(act)
        if then == "silence":
            self.fall_silent(number, lost=True, seconds=151.0)
        elif then is not None:
            self.leave(number, then)

    @rule(
        number=whom,
        how=st.sampled_from(WAYS_TO_LEAVE),
        asks_again=st.booleans(),
        seconds=st.sampled_from([1.0, 2.5, 15.0]),
    )
    def leaves_and_its_release_hangs(self, number: int, how: str, asks_again: bool, seconds: float) -> None:
        self.serve(number, 0, tied=True, beats=False)
        self.hang("close")
        self.leave(number, how)
        if asks_again:
            self.unregister(number, names_itself=False)
        self.time_passes(seconds, 60.0)

    def leave(self, number: int, how: str) -> None:
        if how == "unregister":
            self.unregister(number, names_itself=True)
        elif how == "kill":
            self.kill(number, of=0, closes_first=False, late=False, memory=None)
        elif how == "supersede":
            self.register(number, 1, brings=True)
        else:
            self.operator_reaps(number, None)

    # Of time

    @rule(
        number=whom,
        comes=often,
        at_a_scan=often,
        lost=st.booleans(),
        seconds=st.sampled_from([149.0, 151.0, 400.0, 640.0]),
    )
    def silence_falls(self, number: int, comes: bool, at_a_scan: bool, lost: bool, seconds: float) -> None:
        """Let a worker be silent for longer than it may; from a scan on, another scan comes just at its budget."""
        if comes:
            self.be_at_work(number)
        if at_a_scan:
            self.worker(number).beats = False
            self.time_passes(self.world.until_a_scan(), 30.0)
            self.ping(number, 0)
        self.fall_silent(number, lost=lost, seconds=seconds)

    def fall_silent(self, number: int, *, lost: bool, seconds: float) -> None:
        self.worker(number).beats = False
        if lost:
            self.step(lambda: self.world.lose(self.worker(number)))
        self.time_passes(seconds, 30.0)

    @rule(seconds=pauses, number=whom, for_long=st.sampled_from([0.0, 2.0, 40.0, 130.0]))
    def wake_up_to_a_backlog(self, seconds: float, number: int, for_long: float) -> None:
        """Stop the server, and let it read late what had come meanwhile."""

        def act() -> None:
            self.world.reign.router.pause()
            self.worker(number).ping()
            self.world.stall(seconds)

        self.step(act)
        self.time_passes(for_long or 1.0, 30.0)
        self.step(self.world.reign.router.resume)

    @rule(number=whom, what=st.sampled_from(["open", "close", "gather", "gather", None]))
    def drain(self, number: int, what: Any) -> None:
        """Let the server drain; while something hangs that takes a while, and others go on meanwhile."""
        if what == "gather":
            self.borrow(number, loads=False, then=None)
        elif what is not None:
            self.hang(what)
            self.register(number, 0, brings=True)
            self.register(number, 1, brings=True)
        self.step(self.world.reign.begin_close)
        self.ping(number, 0)
        self.time_passes(1.0, 10.0)
