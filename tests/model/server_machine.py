"""A state machine that drives a whole server through everything that may befall it and its workers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from lmlive.protocol.verbs import Verb
from tests.model.server_world import POLICIES, Worker, World

# Faults lie deep: the common case is drawn far more often, so that an entry lives long enough to get there.
whom = st.sampled_from([0, 0, 0, 0, 2, 2, 1])
memories = st.sampled_from([0, 0, 0, 1, None])
rarely = st.sampled_from([False] * 5 + [True])
often = st.sampled_from([True] * 3 + [False])
times = st.sampled_from([0.25, 1.0, 10.0, 29.75, 60.0, 119.75, 120.0, 120.25, 150.0, 300.0, 390.0, 630.0, 1800.0])
beats = st.sampled_from([10.0, 30.0, 60.0, 119.75, 120.0])
pauses = st.sampled_from([1.25, 1.75, 5.0, 130.0, 700.0])


class ServerMachine(RuleBasedStateMachine):
    patches: ClassVar[Mapping[str, object]] = {}
    counts: ClassVar[list[float]] = [0, 0.0]
    """How many schedules were run, and how much time was watched in them."""

    @initialize(policy=st.sampled_from([POLICIES[0]] * 4 + list(POLICIES[1:])), memory=memories, beats=often)
    def begin(self, policy: Any, memory: int | None, beats: bool) -> None:
        self.world = World(policy, self.patches)
        self.do_serve(0, memory, tied=True, beats=beats)

    def worker(self, number: int) -> Worker:
        return self.world.workers[number]

    def step(self, act: Any) -> None:
        async def run() -> None:
            act()

        self.world.run(run())
        self.world.check()

    # Registering

    def do_serve(self, number: int, memory: int | None, *, tied: bool, beats: bool) -> None:
        world, worker = self.world, self.worker(number)

        def act() -> None:
            world.connect(worker)
            world.hello(worker)
            if tied or memory is not None:
                world.tie(worker, memory)
            world.register(worker, memory)

        self.step(act)
        worker.beats = beats
        if beats:
            self.step(lambda: world.ping(worker))

    @rule(number=whom, memory=memories, tied=often, beats=often)
    def serve(self, number: int, memory: int | None, tied: bool, beats: bool) -> None:
        """Do what most workers do: connect, say who they are, register, and begin to ping."""
        if self.worker(number).killed or self.worker(number).secret in self.world.oracle.ended_secrets:
            self.world.workers[number] = self.world.new_worker(self.worker(number).name, self.worker(number).instance)
        self.do_serve(number, memory, tied=tied, beats=beats)

    @rule(number=whom, memory=memories, brings=often)
    def register(self, number: int, memory: int | None, brings: bool) -> None:
        world, worker = self.world, self.worker(number)

        def act() -> None:
            if brings:
                world.tie(worker, memory)
            world.register(worker, memory)

        self.step(act)

    @rule(number=whom, names_itself=often)
    def unregister(self, number: int, names_itself: bool) -> None:
        world, worker = self.world, self.worker(number)
        instance = worker.instance if names_itself else 0
        self.step(lambda: world.send(worker, Verb.UNREGISTER, [worker.secret], instance_id=instance))

    @rule(beats=st.booleans())
    def rival_comes(self, beats: bool) -> None:
        """Let a stranger try to take, to use and to end the first worker's instance."""
        world, rival = self.world, self.worker(1)
        self.do_serve(1, None, tied=True, beats=beats)
        self.step(lambda: world.send(rival, Verb.UNREGISTER, [rival.secret]))
        rival.beats = False
        if world.oracle.tethers.get(rival.secret, (0, 0, 0, False))[3]:
            self.kill(1, of=0, closes_first=beats, late=False, memory=None)
            world.workers[1] = world.new_worker(rival.name, rival.instance)

    # Signs of life

    @rule(number=whom, back=st.sampled_from([0, 0, 0, 1]))
    def ping(self, number: int, back: int) -> None:
        world, worker = self.world, self.worker(number)
        self.step(lambda: world.ping(worker, generation=max(worker.generation - back, 0)))

    @rule(number=whom, memory=st.sampled_from([0, 1]))
    def the_old_one_speaks(self, number: int, memory: int) -> None:
        """Let a worker speak under the generation that it had before it registered other memory."""
        before = self.worker(number).generation
        self.register(number, memory, brings=True)
        self.register(number, 1 - memory, brings=True)
        worker = self.worker(number)
        self.time_passes(10.0, 10.0)
        self.step(lambda: self.world.ping(worker, generation=before))
        self.step(lambda: self.world.send(worker, Verb.REAP, [worker.instance, before]))

    @rule(number=whom, fresh=often)
    def store(self, number: int, fresh: bool) -> None:
        self.step(lambda: self.world.store(self.worker(number), fresh=fresh))

    @rule(number=whom, of=whom, memory=st.sampled_from([0, 0, 1]))
    def look_up(self, number: int, of: int, memory: int) -> None:
        self.step(lambda: self.world.look_up(self.worker(number), self.worker(of), memory))

    @rule(of=whom)
    def scheduler_looks_up(self, of: int) -> None:
        """Let the third worker lease what another has just stored."""
        self.heal(2, tether_too=True)
        self.step(lambda: self.world.store(self.worker(of), fresh=True))
        self.step(lambda: self.world.look_up(self.worker(2), self.worker(of), 0))

    @rule(by_exit=st.booleans(), late=st.booleans())
    def leaves_with_leases(self, by_exit: bool, late: bool) -> None:
        """Let the third worker end while it holds leases."""
        self.serve(2, None, tied=True, beats=False)
        self.scheduler_looks_up(0)
        if by_exit:
            self.kill(2, of=0, closes_first=True, late=late, memory=None)
        else:
            self.unregister(2, names_itself=late)

    @rule(number=whom)
    def borrow(self, number: int) -> None:
        """Begin a transfer that does not end by itself."""
        world = self.world

        def act() -> None:
            world.hang("gather")
            world.store(self.worker(number), fresh=True)

        self.step(act)

    @rule(number=whom, beats=st.booleans())
    def beat(self, number: int, beats: bool) -> None:
        self.worker(number).beats = beats

    # Ends

    @rule(number=whom, of=whom, closes_first=often, late=rarely, memory=memories)
    def kill(self, number: int, of: int, closes_first: bool, late: bool, memory: int | None) -> None:
        """Kill a process; what it had sent may be read only afterwards."""
        world, worker = self.world, self.worker(number)
        if worker.killed:
            return

        def act() -> None:
            if late:
                world.router.pause()
                world.tie(worker, memory)
                world.register(worker, memory)
                world.ping(worker)
                world.store(worker, fresh=True)
                world.look_up(worker, self.worker(of), 0)
            if closes_first:
                world.lose(worker)
            world.kill(worker)

        self.step(act)
        if late:
            self.step(world.router.resume)

    @rule(number=whom, memory=st.sampled_from([0, 1]), late=st.booleans())
    def kill_while_it_registers(self, number: int, memory: int, late: bool) -> None:
        self.hang("open")
        self.do_serve(number, memory, tied=True, beats=False)
        self.kill(number, of=0, closes_first=late, late=False, memory=None)
        self.let_go("open")

    @rule(number=whom)
    def stop(self, number: int) -> None:
        self.worker(number).stopped = True

    @rule(number=whom, memory=memories)
    def go_on(self, number: int, memory: int | None) -> None:
        """Let a worker wake up, and speak as if nothing had happened."""
        worker = self.worker(number)
        worker.stopped = False
        self.step(lambda: self.world.ping(worker))
        self.step(lambda: self.world.store(worker, fresh=True))

    @rule(number=whom, tether_too=st.booleans())
    def cut(self, number: int, tether_too: bool) -> None:
        def act() -> None:
            self.world.cut(self.worker(number))
            if tether_too:
                self.world.lose(self.worker(number))

        self.step(act)

    @rule(number=whom, tether_too=st.booleans())
    def heal(self, number: int, tether_too: bool) -> None:
        def act() -> None:
            self.world.connect(self.worker(number))
            self.world.hello(self.worker(number))
            if tether_too:
                self.world.tie(self.worker(number), None)

        self.step(act)

    @rule(number=whom, back=st.sampled_from([None, 0, 0, 1]))
    def operator_reaps(self, number: int, back: int | None) -> None:
        worker = self.worker(number)
        generation = None if back is None else max(worker.generation - back, 0)
        self.step(lambda: self.world.send(worker, Verb.REAP, [worker.instance, generation]))

    @rule(number=whom)
    def target_gives_up(self, number: int) -> None:
        self.world.owner.stale.append(self.worker(number).instance)

    # Time

    @rule(seconds=times, beat=beats)
    def time_passes(self, seconds: float, beat: float) -> None:
        self.world.run(self.world.pass_time(seconds, beat))
        self.world.check()

    @rule(number=whom, lost=st.booleans(), seconds=st.sampled_from([149.0, 151.0, 400.0, 640.0]))
    def silence_falls(self, number: int, lost: bool, seconds: float) -> None:
        """Let a worker be silent for longer than it may."""
        self.worker(number).beats = False
        if lost:
            self.step(lambda: self.world.lose(self.worker(number)))
        self.time_passes(seconds, 30.0)

    @rule(seconds=pauses, number=whom, sends=st.booleans())
    def stall(self, seconds: float, number: int, sends: bool) -> None:
        """Stop the server; what a worker sends meanwhile waits."""

        def act() -> None:
            self.world.stall(seconds)
            if sends:
                self.world.ping(self.worker(number))

        self.step(act)

    @rule(seconds=pauses, number=whom, for_long=st.sampled_from([0.0, 2.0, 40.0, 130.0]))
    def wake_up_to_a_backlog(self, seconds: float, number: int, for_long: float) -> None:
        """Stop the server, and let it read late what had come meanwhile."""

        def act() -> None:
            self.world.router.pause()
            self.world.ping(self.worker(number))
            self.world.stall(seconds)

        self.step(act)
        self.time_passes(for_long or 1.0, 30.0)
        self.step(self.world.router.resume)

    @rule(seconds=pauses)
    def machine_sleeps(self, seconds: float) -> None:
        self.step(lambda: self.world.sleep(seconds))

    # Hindrances

    @rule(what=st.sampled_from(["open", "close", "gather"]))
    def hang(self, what: Any) -> None:
        self.step(lambda: self.world.hang(what))

    @rule(what=st.sampled_from(["open", "close", "gather"]))
    def let_go(self, what: Any) -> None:
        self.step(lambda: self.world.let_go(what))

    @rule(what=st.sampled_from(["open", "close", "close"]), really=rarely)
    def fail(self, what: Any, really: bool) -> None:
        if really:
            self.step(lambda: self.world.fail(what))

    @rule(really=rarely, lets_go=often)
    def restart(self, really: bool, lets_go: bool) -> None:
        """End the server and start its successor."""
        if not really:
            return
        world = self.world
        if lets_go:
            world.run(world.quiesce())
        world.end_server()
        world.run(world.start())
        world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            if self.world.sound:
                self.world.finish()
        finally:
            self.counts[0] += 1
            self.counts[1] += self.world.watched
            self.world.tear_down()
